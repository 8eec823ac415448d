"""Eviction policies, one file each behind one interface."""

from beaconscope.kv.heads import HeadInfo
from beaconscope.kv.policies.base import CacheView, Policy, PolicyState, QueryBlock
from beaconscope.kv.policies.beacon import BeaconKV
from beaconscope.kv.policies.bigbird import BigBird
from beaconscope.kv.policies.etc import ETC
from beaconscope.kv.policies.expected_attention import ExpectedAttention
from beaconscope.kv.policies.fastgen import FastGen
from beaconscope.kv.policies.full import Full
from beaconscope.kv.policies.h2o import H2O
from beaconscope.kv.policies.keydiff import KeyDiff
from beaconscope.kv.policies.knorm import Knorm
from beaconscope.kv.policies.lazy_eviction import LazyEviction
from beaconscope.kv.policies.longformer import Longformer
from beaconscope.kv.policies.oracle import Oracle
from beaconscope.kv.policies.parse import POLICIES, parse_policy, policy_kind
from beaconscope.kv.policies.random_eviction import RandomEviction
from beaconscope.kv.policies.rkv import RKV
from beaconscope.kv.policies.rpc import RPC
from beaconscope.kv.policies.scissorhands import ScissorHands
from beaconscope.kv.policies.snapkv import SnapKV
from beaconscope.kv.policies.streaming_llm import StreamingLLM
from beaconscope.kv.policies.tova import TOVA

__all__ = [
    "ETC",
    "H2O",
    "POLICIES",
    "RKV",
    "RPC",
    "TOVA",
    "BeaconKV",
    "BigBird",
    "CacheView",
    "ExpectedAttention",
    "FastGen",
    "Full",
    "HeadInfo",
    "KeyDiff",
    "Knorm",
    "LazyEviction",
    "Longformer",
    "Oracle",
    "Policy",
    "PolicyState",
    "QueryBlock",
    "RandomEviction",
    "ScissorHands",
    "SnapKV",
    "StreamingLLM",
    "parse_policy",
    "policy_kind",
]
