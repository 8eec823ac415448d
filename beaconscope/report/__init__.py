"""The report: one HTML file in which a person sees a chain of thought go back on itself, and figures for a paper."""

from beaconscope.report.figures import write_figures
from beaconscope.report.findings import Findings, findings_of, load_findings
from beaconscope.report.options import ReportOptions
from beaconscope.report.replays import load_replay
from beaconscope.report.report import Subject, build_report

__all__ = [
    "Findings",
    "ReportOptions",
    "Subject",
    "build_report",
    "findings_of",
    "load_findings",
    "load_replay",
    "write_figures",
]
