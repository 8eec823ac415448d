"""Eviction policies, one file each behind one interface."""

from beaconscope.kv.heads import HeadInfo
from beaconscope.kv.policies.base import CacheView, Policy, PolicyState, QueryBlock
from beaconscope.kv.policies.beacon import BeaconKV
from beaconscope.kv.policies.full import Full
from beaconscope.kv.policies.parse import POLICIES, parse_policy
from beaconscope.kv.policies.random_eviction import RandomEviction
from beaconscope.kv.policies.streaming_llm import StreamingLLM

__all__ = [
    "POLICIES",
    "BeaconKV",
    "CacheView",
    "Full",
    "HeadInfo",
    "Policy",
    "PolicyState",
    "QueryBlock",
    "RandomEviction",
    "StreamingLLM",
    "parse_policy",
]
