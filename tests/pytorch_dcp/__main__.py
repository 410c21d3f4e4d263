"""Runs PyTorch's own tests of torch.distributed.checkpoint against it and against both forms of treeckpt.dcp.

    python -m tests.pytorch_dcp [--only NAME ...] [--form FORM ...]

They come from Debian's source package of PyTorch 2.6, which apt fetches and checks, and stay in an ignored folder. A
script adapts them to a machine without a GPU. The table shows each test with each form; the exit status is 1 if one
that passes with DCP fails with another form and is not in `INTERNALS`.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tarfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path

ROOT = Path(__file__).parents[2]
HOME = ROOT / ".cache" / "pytorch-dcp"
FORMS = ("dcp", "treeckpt.dcp", "storage")
FILES = (
    "test_checkpoint",
    "test_compatibility",
    "test_dtensor_checkpoint",
    "test_dtensor_resharding",
    "e2e/test_e2e_save_and_load",
    "e2e/test_fine_tuning",
    "e2e/test_pipeline",
    "test_file_system_checkpoint",
    "test_file_system_checkpoint_cpu",
    "test_format_utils",
    "fsdp/test_fsdp_dsd",
    "test_fsdp_model_state",
    "test_fsdp_optim_state",
    "test_fsdp_tp_checkpoint_conversion",
    "test_hsdp_checkpoint",
    "test_planner",
    "test_save_load_api",
    "test_state_dict",
    "test_tp_checkpoint",
)
INTERNALS: dict[str, str] = {}
"""Tests that look into DCP's own files or classes, with the reason why they cannot pass."""

ADAPTATIONS = (
    (r"(?m)^ *@(skip_if_lt_x_gpu|requires_nccl)\(.*\)\n", ""),
    (r"\.cuda\((self\.rank|dist\.get_rank\(\))?\)", ""),
    (r"cpu:gloo,cuda:nccl", "gloo"),
    (r'"nccl"', '"gloo"'),
    (r"with_comms\(init_rpc=False\)", 'with_comms(init_rpc=False, backend="gloo")'),
    (r"device=(self\.rank|dist\.get_rank\(\))", 'device="cpu"'),
    (r", device='cuda:0'", ""),
    (r'f"cuda:\{dist\.get_rank\(\)\}"', '"cpu"'),
    (r"/cuda:(\{r\}|\d)", "/cpu"),
    (r'"cuda(:0)?"', '"cpu"'),
    (r"torch\.cuda\.device_count\(\)", "4"),
    (r"self\.assertTrue\((.*)\.is_cuda\)", r"self.assertFalse(\1.is_cuda)"),
)


def fetch() -> Path:
    """The folder of the tests as PyTorch has them; fetched with apt, apart from the machine's own lists."""
    source = HOME / "source"
    if not source.exists():
        lists, cache = HOME / "apt" / "lists" / "partial", HOME / "apt" / "cache" / "archives" / "partial"
        for folder in (lists, cache):
            folder.mkdir(parents=True, exist_ok=True)
        sources = HOME / "apt" / "sources.list"
        key = "/usr/share/keyrings/debian-archive-keyring.gpg"
        sources.write_text(f"deb-src [signed-by={key}] http://deb.debian.org/debian trixie main\n")
        options = {
            "Dir::Etc::SourceList": sources,
            "Dir::Etc::SourceParts": "-",
            "Dir::State::Lists": lists.parent,
            "Dir::Cache": cache.parent.parent,
            "APT::Sandbox::User": "root",
        }
        apt = ["apt-get", "-qq", *(part for name, value in options.items() for part in ("-o", f"{name}={value}"))]
        subprocess.run([*apt, "update"], check=True, cwd=HOME)
        subprocess.run([*apt, "--download-only", "--only-source", "source", "pytorch"], check=True, cwd=HOME)
        (archive,) = HOME.glob("pytorch_*.orig.tar.xz")
        with tarfile.open(archive) as tar:
            members = [one for one in tar if re.search(r"/test/distributed/checkpoint/.*\.py$", one.name)]
            for member in members:
                member.name = member.name.split("/test/distributed/checkpoint/")[1]
            tar.extractall(HOME / "extracted", members, filter="data")
        archive.unlink()
        (HOME / "extracted").rename(source)
    return source


def adapt(source: Path) -> Path:
    """The folder of the adapted tests."""
    adapted = HOME / "adapted"
    for name in FILES:
        text = (source / f"{name}.py").read_text()
        for pattern, replacement in ADAPTATIONS:
            text = re.sub(pattern, replacement, text)
        head, future, rest = text.rpartition("from __future__ import annotations\n")
        path = adapted / f"{name.replace('/', '_')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{head}{future}import tests.pytorch_dcp.form\n{rest}")
    return adapted


def run(name: str, form: str, adapted: Path) -> dict[str, str]:
    """The outcome of each test of a file with one form: passed, failed or skipped."""
    report = HOME / "report.xml"
    report.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", "-c", os.devnull, f"--rootdir={adapted}", "--import-mode=prepend", "-q"]
    command += [f"--junitxml={report}", "--timeout=240", "-p", "no:cacheprovider", f"{name.replace('/', '_')}.py"]
    environment = os.environ | {"DCP_FORM": form, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    log = HOME / f"{name.replace('/', '_')}.{form}.log"
    with log.open("w") as output:
        subprocess.run(command, cwd=adapted, env=environment, stdout=output, stderr=subprocess.STDOUT, check=False)
    outcomes: dict[str, str] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        kinds = {child.tag for child in case}
        outcome = "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"
        outcomes[f"{name} {case.get('name')}"] = outcome
    return outcomes


def table(results: dict[str, dict[str, str]]) -> str:
    """The outcomes, a test a line."""
    width = max(map(len, results), default=0)
    lines = [f"{'test':{width}}  " + "  ".join(f"{form:12}" for form in FORMS)]
    lines += [
        f"{test:{width}}  "
        + "  ".join(f"{outcomes.get(form, '-'):12}" for form in FORMS)
        + INTERNALS.get(test.partition(" ")[2], "")
        for test, outcomes in sorted(results.items())
    ]
    counts = [sum(outcomes.get(form) == "passed" for outcomes in results.values()) for form in FORMS]
    return "\n".join([*lines, f"{'passed':{width}}  " + "  ".join(f"{count:<12}" for count in counts)])


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests.pytorch_dcp", description=__doc__)
    parser.add_argument("--only", nargs="*", default=[], help="files whose name contains one of these")
    parser.add_argument("--form", nargs="*", default=FORMS, choices=FORMS)
    parser.add_argument("--keep", action="store_true", help="adds to the results of the run before")
    arguments = parser.parse_args()
    adapted = adapt(fetch())
    kept = HOME / "results.json"
    results: dict[str, dict[str, str]] = json.loads(kept.read_text()) if arguments.keep and kept.exists() else {}
    for name in FILES:
        if arguments.only and not any(part in name for part in arguments.only):
            continue
        for form in arguments.form:
            for test, outcome in run(name, form, adapted).items():
                results.setdefault(test, {})[form] = outcome
            kept.write_text(json.dumps(results, indent=1))
    print(table(results))
    worse = [
        test
        for test, outcomes in results.items()
        if outcomes.get("dcp") == "passed" and "failed" in outcomes.values() and test.partition(" ")[2] not in INTERNALS
    ]
    print(f"{len(worse)} pass with DCP and fail with a form of treeckpt.dcp", *worse, sep="\n  ")
    return bool(worse)


if __name__ == "__main__":
    sys.exit(main())
