"""Registration: our name is known everywhere it must be, and nothing else changes."""

from __future__ import annotations

import copy
import multiprocessing
import os
import pickle
import re
import sys
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

from sparsek_backend.plugin import backend_member, refuse_wrong_settings, register
from sparsek_backend.vllm_backend.names import BACKEND_NAME, BACKEND_PATH
from tests import processes

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.usefixtures("registered")


def run_fresh(code: str) -> str:
    """Run code in a fresh interpreter that has loaded no plugin; returns its output."""
    env_path = f"import sys; sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / 'kernels')!r}]\n"
    done = processes.run(sys.executable, "-c", env_path + code)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip().splitlines()[-1]


def test_importing_the_plugin_is_light() -> None:
    code = (
        "import sparsek_backend.plugin\n"
        "print(sorted({'torch', 'vllm', 'pydantic', 'transformers'} & set(sys.modules)))"
    )
    assert run_fresh(code) == "[]"


def test_registering_does_not_import_the_backend() -> None:
    code = (
        "from sparsek_backend.plugin import register\n"
        "register()\n"
        "heavy = ('sparsek_backend.vllm_backend.backend', 'vllm.model_executor.layers.attention')\n"
        "print([name for name in heavy if name in sys.modules])"
    )
    assert run_fresh(code) == "[]"


def test_entry_point_resolves() -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert '"vllm.general_plugins"]\nsparsek = "sparsek_backend.plugin:register"' in text
    entry = EntryPoint("sparsek", "sparsek_backend.plugin:register", "vllm.general_plugins")
    assert entry.load() is register


def test_member_is_known_by_name_and_leads_to_the_class() -> None:
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    from sparsek_backend.vllm_backend.sparsek.backend import SparseKBackend

    member = AttentionBackendEnum["SPARSEK"]
    assert member is backend_member()
    assert member.get_path() == BACKEND_PATH
    assert member.get_class() is SparseKBackend
    assert SparseKBackend.get_name() == BACKEND_NAME


def test_registering_again_changes_nothing() -> None:
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    def state() -> tuple[Any, ...]:
        platform = type(current_platform)
        return (
            list(AttentionBackendEnum.__members__),
            id(AttentionBackendEnum[BACKEND_NAME]),
            platform.get_attn_backend_cls,
            platform.check_and_update_config,
        )

    before = state()
    register()
    register()
    assert state() == before


def test_settings_in_the_environment_reach_workers_of_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """Theirs is that of whoever started Ray; vLLM copies the variables that it knows."""
    from vllm import envs
    from vllm.ray.ray_env import get_env_vars_to_copy

    envs.disable_envs_cache()  # an engine before this test has frozen what vLLM reads
    for name in ("SPARSEK_TOP_K", "MINE"):
        monkeypatch.setenv(name, "8")
    for mine in ("", "MI,OTHER_"):
        monkeypatch.setenv("VLLM_RAY_EXTRA_ENV_VAR_PREFIXES_TO_COPY", mine)
        register()
        register()
        found = get_env_vars_to_copy()
        assert ("SPARSEK_TOP_K" in found, "MINE" in found) == (True, bool(mine))
        assert envs.VLLM_RAY_EXTRA_ENV_VAR_PREFIXES_TO_COPY.count("SPARSEK_") == 1


def test_old_registry_without_register_gets_the_member(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM before 0.32 has no ``AttentionBackendEnum.register``."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    from sparsek_backend.vllm_backend.register import ensure_member

    monkeypatch.delattr(AttentionBackendEnum, "register", raising=False)
    path = "somewhere.Else"
    member = ensure_member("SPARSEK_OLD", path, backend_member)
    try:
        assert AttentionBackendEnum["SPARSEK_OLD"] is member
        assert AttentionBackendEnum(path) is member
        assert member.get_path() == path
        assert member in list(AttentionBackendEnum)
    finally:
        member.clear_override()
        del AttentionBackendEnum._member_map_["SPARSEK_OLD"]
        del AttentionBackendEnum._value2member_map_[path]
        AttentionBackendEnum._member_names_.remove("SPARSEK_OLD")
        type.__delattr__(AttentionBackendEnum, "SPARSEK_OLD")


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_member_pickles_by_reference(protocol: int) -> None:
    data = pickle.dumps(backend_member(), protocol=protocol)
    assert b"backend_member" in data
    assert BACKEND_PATH.encode() not in data
    assert pickle.loads(data) is backend_member()


def test_member_survives_copies() -> None:
    member = backend_member()
    assert copy.copy(member) is member
    assert copy.deepcopy({"backend": member})["backend"] is member


def test_fresh_process_unpickles_before_plugins_load() -> None:
    data = pickle.dumps(backend_member())
    code = (
        "import pickle\n"
        f"member = pickle.loads({data!r})\n"
        "from vllm.v1.attention.backends.registry import AttentionBackendEnum\n"
        "print(member is AttentionBackendEnum['SPARSEK'])"
    )
    assert run_fresh(code) == "True"


def _name_of(member: Any) -> str:
    return str(member.name)


def test_member_reaches_a_spawned_process() -> None:
    context = multiprocessing.get_context("spawn")
    with context.Pool(1) as pool:
        # a pool starts dead workers again and again
        told = pool.apply_async(_name_of, (backend_member(),)).get(processes.SECONDS)
    assert told == "SPARSEK"


def test_other_backends_are_selected_as_before() -> None:
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum
    from vllm.v1.attention.selector import AttentionSelectorConfig

    if not current_platform.is_cpu():
        pytest.skip("the CPU platform's selection")
    config = AttentionSelectorConfig(64, __import__("torch").float32, "auto", None)
    for name in ("CPU_ATTN", "FLASH_ATTN", "TRITON_ATTN"):
        chosen = current_platform.get_attn_backend_cls(AttentionBackendEnum[name], config)
        assert chosen == AttentionBackendEnum.CPU_ATTN.get_path()
    assert current_platform.get_attn_backend_cls(None, config) == (
        AttentionBackendEnum.CPU_ATTN.get_path()
    )
    assert current_platform.get_attn_backend_cls(backend_member(), config) == BACKEND_PATH
    chosen = current_platform.get_attn_backend_cls(
        selected_backend=backend_member(), attn_selector_config=config, num_heads=4
    )
    assert chosen == BACKEND_PATH


@pytest.mark.parametrize(
    ("arguments", "variable", "words"),
    [
        (["--additional-config", '{"sparsek": {"topk": 4}}'], "", "did you mean top_k?"),
        (["--additional_config={\"sparsek\": {\"top_k\": -1}}"], "", "greater than 0, got -1"),
        (["--additional-config", '{"spasek": {}}'], "", "did you mean the section sparsek?"),
        ([], "TOPK", "did you mean SPARSEK_TOP_K?"),
    ],
)  # fmt: skip
def test_a_wrong_setting_ends_a_server_before_vllm_reads_anything(
    arguments: list[str], variable: str, words: str
) -> None:
    environ = {f"SPARSEK_{variable}": "4"} if variable else {}
    ours = ["serve", "m", "--attention-backend", "sparsek", *arguments]
    with pytest.raises(SystemExit, match=re.escape(words)):
        refuse_wrong_settings(ours, environ)
    refuse_wrong_settings(["serve", "m", *arguments], environ)
    refuse_wrong_settings(["serve", "m", "--attention-backend", "FLASH_ATTN", *arguments], environ)


def test_what_the_model_or_vllm_decides_is_left_to_them() -> None:
    ours = ["serve", "m", "--attention-backend=SPARSEK", "--additional-config"]
    for section in ('{"sparsek": {"mode": "of another plugin"}}', '{"sparsek": ', '{"other": 1}'):
        refuse_wrong_settings([*ours, section], {"SPARSEK_TOP_K": "4", "SPARSEK_PORT": "tcp://h"})
    refuse_wrong_settings(ours, {})


def test_a_servers_process_says_the_setting_and_nothing_else() -> None:
    code = (
        "import sys\n"
        "sys.argv = ['vllm', 'serve', 'm', '--attention-backend', 'SPARSEK']\n"
        "from vllm.plugins import load_general_plugins\n"
        "load_general_plugins()"
    )
    path = processes.import_path(ROOT, ROOT / "kernels")
    environ = os.environ | {"SPARSEK_TOPK": "4", "PYTHONPATH": path}
    done = processes.run(sys.executable, "-c", code, env=environ)
    assert done.returncode == 1
    assert done.stderr.strip().splitlines()[-1].startswith("error: SPARSEK setting SPARSEK_TOPK")
    assert "Traceback" not in done.stderr
