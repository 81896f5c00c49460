"""Builds the stand-ins for the torch and vLLM of the running interpreter.

The C sources are linked once to learn which calls they implement. Every other symbol
that an installed library imports from CUDA, or that the CUDA headers declare,
gets a stub that counts its calls. The result is one library that answers for
all of CUDA (`libcuda.so.1`) and empty ones under the other names.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from . import elf
from .errors import VgpuError

SOURCES = Path(__file__).parent / "src"
# The layers of SOURCES, the lowest first, a folder each: a file calls only
# its own and lower ones (tests/vgpu/device/test_source_layers.py). See README.md.
LAYERS = ("state", "memory", "streams", "sources", "control")
# Also under the names that wheels give their own copies (libcudart.0a1b2c3d.so.13).
STAND_IN = re.compile(r"lib(cudart|cublas|cublasLt)([.-][0-9a-f]{8})?\.so\.(\d+)[\d.]*")
NCCL = "libnccl.so.2"
# In a folder of its own: the real one, which it needs, has the same name.
CUTE_DSL = "cute/libcute_dsl_runtime.so"
CUDA_NAME = re.compile(
    r"cu[A-Z]\w*|cuda[A-Z]\w*|__cuda[A-Z]\w*|cublas\w+|nvml[A-Z]\w*|nccl[A-Z]\w*"
)
LATE_STUBS = 256
# What finds NVML's calls at run time: its binding, PyTorch, and CUPTI, which comes
# with every PyTorch and knows most of nvml.h.
NVML_USERS = ("**/pynvml.py", "torch/lib/libc10_cuda.so", "nvidia/**/libcupti.so*")

# Doing nothing is correct for these; --strict makes them errors.
IGNORED = re.compile(
    r"cuda?ProfilerSt(art|op)|cuda?StreamAttachMemAsync.*|cuda?MemAdvise.*"
    r"|cuda?MemPrefetchAsync.*|cudaGraphDebugDotPrint|cuda?CtxResetPersistingL2Cache"
    r"|cudaFuncSetCacheConfig|cudaFuncSetSharedMemConfig|cudaSetDeviceFlags"
    r"|__cuda\w+"
)
# cuBLAS calls that compute do nothing, as kernels do.
COMPUTES = re.compile(
    r"cublas(?!Lt)(?!Get|Set|Create|Destroy|Logger|Xt|Init|Shutdown|Alloc|Free)\w+"
)


@dataclass(frozen=True)
class Headers:
    """Include folders, the CUDA one first."""

    cuda: Path
    folders: tuple[Path, ...]


def site_packages() -> Path:
    return Path(sysconfig.get_path("purelib"))


def require_torch() -> None:
    """Raises VgpuError unless a CUDA build of torch is installed."""
    try:
        version = metadata.version("torch")
    except metadata.PackageNotFoundError:
        raise VgpuError(
            f"no torch in the environment of {sys.executable}; run vgpu with the "
            "interpreter of the environment it is to serve"
        ) from None
    lib = site_packages() / "torch" / "lib"
    if not (lib / "libtorch_cuda.so").exists():
        raise VgpuError(
            f"torch {version} has no CUDA (no libtorch_cuda.so): install a CUDA build"
        )


def find_headers() -> Headers:
    """The headers of the nvidia packages (one folder since CUDA 13, before one for each
    package), else those of the Triton wheel."""
    site = site_packages()
    triton = site / "triton" / "backends" / "nvidia" / "include"
    runtime = site / "nvidia" / "cuda_runtime" / "include"
    each = sorted(p for p in site.glob("nvidia/*/include") if p != runtime)
    nvidia = sorted(site.glob("nvidia/cu[0-9]*/include"), reverse=True)
    for cuda, others in (
        *((folder, [*nvidia, triton]) for folder in nvidia),
        (runtime, [*each, triton]),
        (triton, [*nvidia, triton]),
    ):
        folders = [cuda, *(p for p in others if p != cuda and p.is_dir())]
        complete = (cuda / "cuda.h").exists() and (cuda / "cuda_runtime_api.h").exists()
        if complete and any((f / "crt" / "host_defines.h").exists() for f in folders):
            if not any((f / "cublasLt.h").exists() for f in folders):
                continue
            nccl = site / "nvidia" / "nccl" / "include"
            if not (nccl / "nccl.h").exists():
                raise VgpuError(f"no {nccl}/nccl.h: install the package nvidia-nccl")
            return Headers(cuda, (*folders, nccl))
    raise VgpuError(
        "no CUDA headers: looked for cuda.h, cuda_runtime_api.h, crt/ and cublasLt.h "
        f"in {site}/nvidia/*/include and {triton}; install the packages "
        "nvidia-cuda-runtime, nvidia-cuda-crt and nvidia-cublas, or triton"
    )


def find_compiler() -> str:
    """$CC, or the first C compiler on the path."""
    for name in (os.environ.get("CC"), "cc", "gcc", "clang"):
        if name and shutil.which(name.split()[0]):
            return name
    raise VgpuError(
        "no C compiler: looked for $CC, cc, gcc and clang; install one (for example "
        "the package gcc) or set CC"
    )


def libraries() -> list[Path]:
    """The installed shared objects, any of which may import from CUDA."""
    found = {p.resolve() for p in site_packages().rglob("*.so*") if p.is_file()}
    return sorted(found)


def installed() -> list[str]:
    """A cheap fingerprint of the installed packages."""
    records = site_packages().glob("*.dist-info/RECORD")
    return sorted(f"{p.parent.name} {p.stat().st_mtime_ns}" for p in records)


def key(headers: Headers, compiler: str) -> str:
    """A name for the inputs of the build."""
    digest = hashlib.sha256()
    for path in (Path(__file__), *sorted(SOURCES.glob("*/*.[ch]"))):
        digest.update(path.read_bytes())
    for line in (compiler, str(headers.cuda), *installed()):
        digest.update(f"{line}\n".encode())
    return digest.hexdigest()[:16]


def build_root() -> Path:
    """`build/vgpu` next to the package, or $VGPU_BUILD_DIR."""
    default = Path(__file__).resolve().parent.parent / "build" / "vgpu"
    return Path(os.environ.get("VGPU_BUILD_DIR", default))


def ensure(*, quiet: bool = True) -> Path:
    """The folder with the stand-ins, built if needed. Raises VgpuError."""
    require_torch()
    headers, compiler = find_headers(), find_compiler()
    target = build_root() / key(headers, compiler)
    if (target / "libcuda.so.1").exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=".building-", dir=target.parent))
    try:
        _build(work, headers, compiler)
        try:
            work.rename(target)
        except OSError:  # another process was faster
            if not (target / "libcuda.so.1").exists():
                raise
    finally:
        shutil.rmtree(work, ignore_errors=True)
    if not quiet:
        summary = json.loads((target / "summary.json").read_text())
        print(
            f"built {target}: {summary['implemented']} calls, {summary['stubs']} stubs"
        )
    return target


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise VgpuError(
            f"the compiler failed ({done.returncode}): {' '.join(command)}\n"
            f"{done.stderr.strip()[-4000:]}"
        )


def compile_flags(headers: Headers, work: Path) -> list[str]:
    """For one source or all; makes a folder in `work` that the headers need."""
    # cuda_fp16.h, which cuBLAS includes, wants a header of CCCL that C never uses.
    missing = work / "missing" / "nv"
    missing.mkdir(parents=True, exist_ok=True)
    (missing / "target").touch()
    return [
        *("-std=gnu11", "-O2", "-g1", "-Wall", "-Wextra", "-fPIC"),
        *("-fwrapv", "-fvisibility=hidden", "-D_GNU_SOURCE", f"-I{SOURCES}"),
        *(f"-isystem{folder}" for folder in headers.folders),
        *("-idirafter", str(missing.parent)),
    ]


def _link(
    compiler: str,
    headers: Headers,
    sources: Iterable[Path],
    output: Path,
    aliases: dict[str, str] | None = None,
) -> None:
    _run(
        [
            *compiler.split(),
            *compile_flags(headers, output.parent),
            *("-shared", "-Wl,-soname,libcuda.so.1", "-Wl,-Bsymbolic"),
            *(f"-Wl,--defsym={a}={name}" for a, name in (aliases or {}).items()),
            *("-o", str(output), *(str(s) for s in sources)),
            *("-ldl", "-lpthread"),
        ]
    )


def _imports(major: int) -> tuple[set[str], dict[str, set[str]]]:
    """Names imported from CUDA, and the versions asked of each stand-in by name."""
    names: set[str] = set()
    versions: dict[str, set[str]] = {}
    for path in libraries():
        try:
            library = elf.read(path)
        except (elf.NotElf, OSError):
            continue
        for name, source in library.undefined.items():
            ours = source in ("", "libcuda.so.1", NCCL) or STAND_IN.fullmatch(source)
            if ours and CUDA_NAME.fullmatch(name):
                names.add(name)
        for needed in (*library.needed, *library.versions):
            match = STAND_IN.fullmatch(needed)
            if match and int(match[3]) == major:
                asked = library.versions.get(needed, set())
                versions.setdefault(needed, set()).update(asked)
    return names, versions


def _major(headers: Headers) -> int:
    """The CUDA version of the headers: stand-ins are for this one only."""
    text = (headers.cuda / "cuda.h").read_text(errors="replace")
    match = re.search(r"#define\s+CUDA_VERSION\s+(\d+)", text)
    if not match:
        raise VgpuError(f"{headers.cuda}/cuda.h has no CUDA_VERSION")
    return int(match[1]) // 1000


def _declared(headers: Headers) -> set[str]:
    """Functions the headers declare, and their versioned names."""
    names: set[str] = set()
    for header in ("cuda.h", "cuda_runtime_api.h", "cublas_api.h", "cublasLt.h"):
        path = next(
            (f / header for f in headers.folders if (f / header).exists()), None
        )
        if path is None:
            continue
        text = path.read_text(errors="replace")
        for name in re.findall(r"\b((?:cu[A-Z]|cuda[A-Z]|cublas)\w*)\s*\(", text):
            names.add(name)
        names.update(re.findall(r"#define\s+cu\w+\s+(cu\w+_v\d+)\b", text))
    constants = re.compile(r"(CU|cuda|cublas)[A-Z_0-9]+")
    return {n for n in names if CUDA_NAME.fullmatch(n) and not constants.fullmatch(n)}


def _per_thread(headers: Headers) -> dict[str, str]:
    """Names of calls for programs whose default stream is the thread's, each with its
    call: there is one default stream here."""
    names: dict[str, str] = {}
    for header in ("cuda.h", "cuda_runtime_api.h"):
        path = next(f / header for f in headers.folders if (f / header).exists())
        text = path.read_text(errors="replace")
        for kind, name in re.findall(r"__CUDA(?:RT)?_API_PT(DS|SZ)\((cu\w+)\)", text):
            names[f"{name}_pt{kind.lower()}"] = name
    return names


def _nvml_names() -> set[str]:
    """The calls that installed libraries look up by their names, and those of nvml.h
    if a package has it. A call in version 3 exists in the versions before."""
    names: set[bytes] = set()
    for pattern in NVML_USERS:
        for path in site_packages().glob(pattern):
            names.update(
                re.findall(rb"[\0\"](nvml[A-Z]\w+)(?=[\0\"])", path.read_bytes())
            )
    for path in site_packages().glob("nvidia/*/include/nvml.h"):
        names.update(re.findall(rb"\b(nvml[A-Z]\w+) *\(", path.read_bytes()))
    result = {n.decode() for n in names if not n.endswith((b"_t", b"_st", b"_enum"))}
    for name in list(result):
        call, _, newest = name.rpartition("_v")
        if newest.isdecimal() and int(newest) > 1:
            result |= {call, *(f"{call}_v{n}" for n in range(2, int(newest)))}
    return result


def _nccl_names() -> set[str]:
    """The exports of the installed NCCL."""
    names: set[str] = set()
    for path in site_packages().glob(f"nvidia/nccl/lib/{NCCL}"):
        names.update(elf.read(path).defined)
    return {n for n in names if re.fullmatch(r"nccl[A-Z]\w+", n)}


def _versions(headers: Headers) -> list[tuple[str, int, str]]:
    """(call, CUDA version, symbol): the n-th version of a call is `call_vn`."""
    path = headers.cuda / "cudaTypedefs.h"
    if not path.exists():
        path = next((f / "cudaTypedefs.h" for f in headers.folders), path)
    text = path.read_text(errors="replace") if path.exists() else ""
    by_name: dict[str, set[int]] = {}
    for name, version in re.findall(r"\bPFN_(cu\w+?)_v(\d{4,6})\b(?!_)", text):
        by_name.setdefault(name, set()).add(int(version))
    rows = []
    for name, numbers in sorted(by_name.items()):
        for i, version in enumerate(sorted(numbers)):
            rows.append((name, version, name if i == 0 else f"{name}_v{i + 1}"))
    return rows


def _call_class(name: str) -> str:
    if IGNORED.fullmatch(name):
        return "CALL_IGNORED"
    return "CALL_COMPUTES" if COMPUTES.fullmatch(name) else "CALL_ERROR"


def _array(declaration: str, items: list[str]) -> list[str]:
    """C has no empty arrays: one gets a zero that is never read."""
    return [f"{declaration} = {{", *(f"  {item}," for item in items or ["0"]), "};"]


def _names_source(stubs: list[str]) -> str:
    lines = ['#include "state/names.h"', ""]
    lines += _array("const char *const call_name[]", [f'"{name}"' for name in stubs])
    lines += _array("const int call_class[]", [_call_class(name) for name in stubs])
    lines += [f"const int calls = {len(stubs)};", ""]
    return "\n".join(lines)


def _stubs_source(stubs: list[str], versions: list[tuple[str, int, str]]) -> str:
    late = range(LATE_STUBS)
    lines = ['#include "sources/stubs.h"', ""]
    lines += [
        f"EXPORT int {name}(void *a) {{ return call_stub({i}, a); }}"
        for i, name in enumerate(stubs)
    ]
    lines += _array(
        "const CallVersion call_version[]",
        [f'{{"{name}", "{symbol}", {v}}}' for name, v, symbol in versions] or ["{0}"],
    )
    lines += [f"const int call_versions = {len(versions)};"]
    lines += [f"static int late_{i}(void) {{ return late_stub({i}); }}" for i in late]
    lines += _array("int (*const late_stubs[])(void)", [f"late_{i}" for i in late])
    return "\n".join([*lines, ""])


def write_stubs(
    folder: Path, stubs: list[str], versions: list[tuple[str, int, str]]
) -> list[Path]:
    """Writes the generated files, each in the folder of its layer."""
    files = {
        folder / "state" / "names.c": _names_source(stubs),
        folder / "sources" / "stubs.c": _stubs_source(stubs, versions),
    }
    for path, text in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return list(files)


def _alias(compiler: str, folder: Path, soname: str, versions: set[str]) -> None:
    """An empty library under another name, with the versions asked of it."""
    script = folder / f"{soname}.map"
    script.write_text("".join(f"{v} {{ }};\n" for v in sorted(versions)))
    scripts = [f"-Wl,--version-script={script}"] if versions else []
    _run(
        [
            *compiler.split(),
            *("-shared", "-fPIC", "-nostdlib", f"-Wl,-soname,{soname}"),
            *scripts,
            *("-Wl,--no-as-needed", "-o", str(folder / soname)),
            *(f"-L{folder}", "-l:libcuda.so.1"),
        ]
    )
    script.unlink()


def _cute_dsl(compiler: str, folder: Path, major: int) -> None:
    """CuTe DSL's runtime has a CUDA runtime linked into it. The archive next to it has
    its calls without one, so that they reach the stand-ins; the rest is the real one's.
    """
    runtime = site_packages() / f"nvidia_cutlass_dsl/cu{major}/lib"
    archive = runtime / "libcuda_dialect_runtime_static.a"
    if not archive.exists():
        return
    (folder / CUTE_DSL).parent.mkdir()
    real = runtime / Path(CUTE_DSL).name
    _run(
        [
            *compiler.split(),
            *("-shared", "-Wl,-Bsymbolic", "-Wl,-soname,libcuda_dialect.so"),
            *("-o", str(folder / CUTE_DSL), "-Wl,--whole-archive", str(archive)),
            *("-Wl,--no-whole-archive", str(folder / "libcuda.so.1")),
            *("-Wl,--no-as-needed", str(real), f"-Wl,-rpath,{runtime}"),
        ]
    )


def _build(folder: Path, headers: Headers, compiler: str) -> None:
    sources = sorted(SOURCES.glob("*/*.c"))
    library = folder / "libcuda.so.1"
    generated = folder / "generated"
    nothing = write_stubs(generated, [], [])
    _link(compiler, headers, [*sources, *nothing], library)
    implemented = elf.read(library).defined
    imported, aliases = _imports(_major(headers))
    wanted = imported | _declared(headers) | _nvml_names() | _nccl_names()
    versions = _versions(headers)
    wanted |= {symbol for _, _, symbol in versions}
    per_thread = _per_thread(headers)
    wanted |= set(per_thread.values())
    per_thread = {a: n for a, n in per_thread.items() if a not in implemented}
    stubs = sorted(wanted - implemented - per_thread.keys())
    sources += write_stubs(generated, stubs, versions)
    _link(compiler, headers, sources, library, per_thread)
    _cute_dsl(compiler, folder, _major(headers))
    aliases[NCCL] = set()
    for soname, names in sorted(aliases.items()):
        _alias(compiler, folder, soname, names)
    nvml, absent = folder / "nvml", folder / "nvml-absent"
    nvml.mkdir()
    _alias(compiler, folder, "libnvidia-ml.so.1", set())
    (folder / "libnvidia-ml.so.1").rename(nvml / "libnvidia-ml.so.1")
    absent.mkdir()  # a file that cannot be loaded hides the real library
    (absent / "libnvidia-ml.so.1").write_text("")
    shutil.rmtree(folder / "missing")
    summary = {
        "implemented": len({n for n in implemented if CUDA_NAME.fullmatch(n)}),
        "stubs": len(stubs),
        "imported_stubs": sorted(imported - implemented),
        "aliases": sorted(aliases),
        "torch": metadata.version("torch"),
    }
    (folder / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
