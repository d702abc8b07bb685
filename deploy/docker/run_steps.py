"""Run the RUN and COPY steps of a Dockerfile's last stage in a root folder, without Docker.

    sudo unshare --mount python run_steps.py Dockerfile.cpu --root /srv/root

The root folder stands for the base image (`debootstrap` makes one). Steps change it, as they change
an image: start from a fresh one. Stages before the last give way to folders: `COPY --from=wheel`
copies from `--stage wheel=FOLDER`. Needs root, for chroot, and a mount namespace of its own.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from dockerfile_parse import DockerfileParser  # type: ignore[import-not-found]

CONTEXT = Path(__file__).parents[2]
_CHROOT = shutil.which("chroot") or "/usr/sbin/chroot"
DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class Image:
    """The state that instructions change: variables, user, folder and shell."""

    def __init__(self, root: Path, arguments: dict[str, str], stages: dict[str, Path]) -> None:
        self.root = root
        self.arguments = arguments
        self.stages = stages
        self.variables = {"PATH": DEFAULT_PATH}
        self.passed = {k: v for k, v in os.environ.items() if k.startswith("PIP_")}
        self.user = "0:0"
        self.folder = "/"
        self.shell = ["/bin/sh", "-c"]
        self.command: list[str] = []

    def run(self, words: list[str]) -> None:
        """Run a program inside the root, as the present user."""
        environment = {**self.passed, **self.arguments, **self.variables, "HOME": self.home()}
        inner = f"cd {shlex.quote(self.folder)} && exec {shlex.join(words)}"
        chroot = [_CHROOT, f"--userspec={self.user}", str(self.root)]
        subprocess.run([*chroot, "/bin/sh", "-c", inner], env=environment, check=True)

    def home(self) -> str:
        """Return the present user's home folder, by the root's /etc/passwd."""
        for line in (self.root / "etc/passwd").read_text().splitlines():
            _, _, number, _, _, home, _ = line.split(":")
            if number == self.user.split(":")[0]:
                return home
        return "/"

    def expand(self, text: str) -> str:
        """Put values in place of $NAME and ${NAME}."""
        for name, value in {**self.arguments, **self.variables}.items():
            text = text.replace(f"${{{name}}}", value).replace(f"${name}", value)
        return text

    def copy(self, value: str) -> None:
        """Copy from the build context or from a named stage, less what .dockerignore names."""
        words = shlex.split(self.expand(value))
        options = dict(w[2:].split("=", 1) for w in words if w.startswith("--"))
        *sources, target = [w for w in words if not w.startswith("--")]
        base = self.stages[options["from"]] if "from" in options else CONTEXT
        destination = self.root / os.path.join(self.folder, target).lstrip("/")
        for source in sources:
            path = base if "from" in options else base / source
            if path.is_dir():
                shutil.copytree(path, destination, dirs_exist_ok=True, ignore=_ignored)
                place = destination
            else:
                place = destination / path.name if target.endswith("/") else destination
                place.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(path, place)
            inside = f"/{place.relative_to(self.root)}"
            if "chmod" in options:
                subprocess.run(["chroot", self.root, "chmod", options["chmod"], inside], check=True)
            if "chown" in options:
                owner = options["chown"]
                subprocess.run(["chroot", self.root, "chown", "-R", owner, inside], check=True)

    def apply(self, instruction: str, value: str) -> None:
        """Carry out one instruction; those that only describe the image do nothing here."""
        match instruction:
            case "RUN":
                print(f"==> RUN {value}", flush=True)
                self.run([*self.shell, value])
            case "COPY":
                print(f"==> COPY {value}", flush=True)
                self.copy(value)
            case "ARG":
                name, _, default = value.partition("=")
                self.arguments.setdefault(name, self.expand(default))
            case "ENV":
                for word in shlex.split(value):
                    name, _, text = word.partition("=")
                    self.variables[name] = self.expand(text)
            case "USER":
                self.user = value
            case "WORKDIR":
                self.folder = value
                made = self.root / value.lstrip("/")
                made.mkdir(parents=True, exist_ok=True)
            case "SHELL":
                self.shell = json.loads(value)
            case "ENTRYPOINT":
                self.command = json.loads(value)
            case "CMD":
                self.command += json.loads(value)
            case "FROM" | "LABEL" | "EXPOSE" | "VOLUME" | "HEALTHCHECK" | "COMMENT":
                pass
            case _:
                raise ValueError(f"instruction: expected one of a Dockerfile, got {instruction}")


def _ignored(folder: str, names: list[str]) -> set[str]:
    lines = (CONTEXT / ".dockerignore").read_text().splitlines()
    patterns = [line.removeprefix("**/") for line in lines if line.startswith("**/")]
    return {name for name in names if any(fnmatch.fnmatch(name, p) for p in patterns)}


def last_stage(dockerfile: Path) -> list[tuple[str, str]]:
    """Return the instructions before the first FROM, then the instructions of the last stage."""
    with dockerfile.open("rb") as stream:
        parsed = DockerfileParser(fileobj=stream).structure
    steps = [(item["instruction"], item["value"]) for item in parsed]
    starts = [i for i, (name, _) in enumerate(steps) if name == "FROM"]
    return steps[: starts[0]] + steps[starts[-1] :]


def prepare(root: Path, binds: list[Path]) -> None:
    """Give the root what a container has: /proc, /sys, /dev, the resolver; and binds."""
    for folder in ("proc", "sys", "dev"):
        (root / folder).mkdir(exist_ok=True)
        subprocess.run(["mount", "--rbind", f"/{folder}", root / folder], check=True)
    if Path("/etc/resolv.conf").exists():
        shutil.copy("/etc/resolv.conf", root / "etc/resolv.conf")
    for path in binds:
        target = root / str(path).lstrip("/")
        if path.is_dir():
            target.mkdir(parents=True, exist_ok=True)
        else:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.touch()
        subprocess.run(["mount", "--bind", path, target], check=True)


def main() -> int:
    """Run the steps, and at the end a command as the image's user."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("dockerfile", type=Path)
    parser.add_argument("--root", type=Path, required=True, help="folder that stands for the image")
    parser.add_argument("--build-arg", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--stage", action="append", default=[], metavar="NAME=FOLDER")
    parser.add_argument("--bind", action="append", default=[], type=Path, help="host path")
    parser.add_argument(
        "--env", action="append", default=[], metavar="NAME=VALUE", help="of a base"
    )
    parser.add_argument("--only-command", action="store_true", help="the steps have run before")
    parser.add_argument("--start", action="store_true", help="end with ENTRYPOINT and CMD")
    parser.add_argument("--then", help="shell command to run at the end")
    options = parser.parse_args()
    stages = {n: Path(p) for n, p in (s.split("=", 1) for s in options.stage)}
    image = Image(options.root, dict(a.split("=", 1) for a in options.build_arg), stages)
    for variable in options.env:
        image.apply("ENV", shlex.quote(variable))
    prepare(options.root, options.bind)
    for instruction, value in last_stage(options.dockerfile):
        if options.only_command and instruction in ("RUN", "COPY"):
            continue
        image.apply(instruction, value)
    if options.then:
        image.run(["/bin/sh", "-c", options.then])
    if options.start:
        image.run(image.command)
    return 0


if __name__ == "__main__":
    sys.exit(main())
