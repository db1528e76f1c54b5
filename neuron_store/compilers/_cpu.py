"""What this host's processor can do, in the words that LLVM uses."""

from __future__ import annotations

import functools
import os

import attrs

__all__ = ["HostCPU", "host_cpu", "parse_cpuinfo"]

# The x86-64 psABI's micro-architecture levels, each on top of the one before.
# https://gitlab.com/x86-psABIs/x86-64-ABI, "Micro-Architecture Levels"
_LEVELS = (
    ("x86-64-v2", {"cx16", "popcnt", "sahf", "sse3", "sse4.1", "sse4.2", "ssse3"}),
    ("x86-64-v3", {"avx", "avx2", "bmi", "bmi2", "f16c", "fma", "lzcnt", "movbe", "xsave"}),
    ("x86-64-v4", {"avx512bw", "avx512cd", "avx512dq", "avx512f", "avx512vl"}),
)

# Where Linux's name in /proc/cpuinfo is not LLVM's (arch/x86/include/asm/cpufeatures.h against
# llvm/lib/Target/X86/X86.td; arch/arm64/kernel/cpuinfo.c against AArch64Features.td).
_X86_NAMES = {
    "3dnowprefetch": "prfchw",
    "abm": "lzcnt",
    "bmi1": "bmi",
    "fpu": "x87",
    "lahf_lm": "sahf",
    "lm": "64bit",
    "pclmulqdq": "pclmul",
    "pni": "sse3",
    "rdrand": "rdrnd",
    "sha_ni": "sha",
    "sse4_1": "sse4.1",
    "amx_bf16": "amx-bf16",
    "amx_fp16": "amx-fp16",
    "amx_int8": "amx-int8",
    "amx_tile": "amx-tile",
}
_ARM_NAMES = {
    "asimd": "neon",
    "asimddp": "dotprod",
    "asimdfhm": "fp16fml",
    "asimdhp": "fullfp16",
    "asimdrdm": "rdm",
    "atomics": "lse",
    "crc32": "crc",
    "fcma": "complxnum",
    "fp": "fp-armv8",
    "jscvt": "jsconv",
    "lrcpc": "rcpc",
    "pmull": "aes",
}

# For the system, for hints and for saving state: no code generator emits them on its own, and
# hypervisors hide them at will. A host without them runs the artifact all the same.
_NEVER_EMITTED = frozenset(
    {
        "cldemote", "clflushopt", "clwb", "clzero", "enqcmd", "fsgsbase", "fxsr", "hreset",
        "invpcid", "kl", "lwp", "movdir64b", "movdiri", "mwaitx", "pconfig", "pku", "prefetchi",
        "prfchw", "ptwrite", "rdpid", "rdpru", "rdrnd", "rdseed", "serialize", "sgx", "shstk",
        "tsxldtrk", "uintr", "usermsr", "waitpkg", "wbnoinvd", "widekl", "xsave", "xsavec",
        "xsaveopt", "xsaves",
    }
)  # fmt: skip


@attrs.frozen
class HostCPU:
    """A processor: its architecture and its features, by LLVM's names."""

    arch: str
    features: frozenset[str]

    @property
    def level(self) -> str:
        """The most that code for this processor may assume, as LLVM's `-mcpu` names it.

        A level and not the model, so that hosts of one fleet with different models share artifacts.
        """
        if self.arch != "x86_64":
            return "generic"
        reached = "x86-64"
        for name, needed in _LEVELS:
            if not needed <= self.features:
                break
            reached = name
        return reached

    def lacks(self, features: frozenset[str]) -> list[str]:
        """Those of `features` that code may use and this processor has not, sorted."""
        return sorted(features - self.features - _NEVER_EMITTED)

    @property
    def usable(self) -> list[str]:
        """The features that generated code may use, sorted."""
        return sorted(self.features - _NEVER_EMITTED)


def parse_cpuinfo(arch: str, text: str) -> HostCPU:
    """The processor that the text of `/proc/cpuinfo` describes; its first core speaks for all."""
    x86 = arch == "x86_64"
    label = "flags" if x86 else "Features"
    words: list[str] = []
    for line in text.splitlines():
        name, colon, value = line.partition(":")
        if colon and name.strip() == label:
            words = value.split()
            break
    names = _X86_NAMES if x86 else _ARM_NAMES
    features = {names.get(word, word.replace("_", "")) for word in words}
    if "sse4_2" in words:
        features |= {"sse4.2", "crc32"}
        features.discard("sse42")
    return HostCPU(arch, frozenset(features & _KNOWN[arch]) if arch in _KNOWN else frozenset())


# What else the kernel lists (bugs, power, virtualisation) is nothing that LLVM has a name for, and
# `+name` with an unknown name is an error there.
_KNOWN = {
    "x86_64": frozenset(
        {
            "64bit", "adx", "aes", "amx-bf16", "amx-fp16", "amx-int8", "amx-tile", "avx",
            "avx2", "avx512bf16", "avx512bitalg", "avx512bw", "avx512cd", "avx512dq", "avx512f",
            "avx512fp16", "avx512ifma", "avx512vbmi", "avx512vbmi2", "avx512vl", "avx512vnni",
            "avx512vp2intersect", "avx512vpopcntdq", "avxifma", "avxvnni", "avxvnniint8",
            "avxneconvert", "bmi", "bmi2", "cmov", "crc32", "cx16", "cx8", "f16c", "fma",
            "fma4", "fxsr", "gfni", "lzcnt", "mmx", "movbe", "pclmul", "popcnt", "sahf", "sha",
            "sse", "sse2", "sse3", "sse4.1", "sse4.2", "sse4a", "ssse3", "tbm", "vaes",
            "vpclmulqdq", "x87", "xop", "xsave",
        }
    ),
    "aarch64": frozenset(
        {
            "aes", "bf16", "complxnum", "crc", "dotprod", "fp-armv8", "fp16fml", "fullfp16",
            "i8mm", "jsconv", "lse", "neon", "rcpc", "rdm", "sha2", "sha3", "sve", "sve2",
        }
    ),
}  # fmt: skip


@functools.cache
def host_cpu() -> HostCPU:
    """The processor of this host."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as info:
            # One core's lines; a large host has a megabyte of them.
            text = info.read(32 << 10)
    except OSError:
        text = ""
    return parse_cpuinfo(os.uname().machine, text)
