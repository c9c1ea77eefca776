from pathlib import Path

import pytest
import yaml

from daemon.config.settings import Config, StartSettings, load_config, stated_settings
from daemon.errors import ConfigError

MINIMAL = """\
rules: rules.yaml
catalog: experts/catalog.yaml
devices:
  cpu: {expert_memory: 250MB}
"""


def a_config(folder: Path, text: str = MINIMAL, **environ: str) -> Config:
    path = folder / "coserve.yaml"
    path.write_text(text, encoding="utf-8")
    return load_config(path, environ)


def problems_of(folder: Path, text: str, **environ: str) -> str:
    with pytest.raises(ConfigError) as caught:
        a_config(folder, text, **environ)
    return str(caught.value)


def test_paths_are_relative_to_the_file(tmp_path: Path) -> None:
    config = a_config(tmp_path)
    assert config.rules == tmp_path / "rules.yaml"
    assert config.database == f"sqlite:///{tmp_path}/inspection.db"
    assert config.endpoints.control == f"ipc://{tmp_path}/run/control.sock"
    assert config.quarantine == tmp_path / "quarantine"


def test_secrets_may_lie_where_systemd_puts_credentials(tmp_path: Path) -> None:
    text = MINIMAL + (
        "security: {server_key: $CREDENTIALS_DIRECTORY/server, allowed_clients: /etc/coserve/clients,"
        " http_token: $CREDENTIALS_DIRECTORY/token, weights: [shared, /srv/weights]}\n"
    )
    security = a_config(tmp_path, text, CREDENTIALS_DIRECTORY="/run/credentials/coserve.service").security
    assert security.server_key == Path("/run/credentials/coserve.service/server")
    assert security.http_token == Path("/run/credentials/coserve.service/token")
    assert security.allowed_clients == Path("/etc/coserve/clients")
    assert security.weights == [tmp_path / "shared", Path("/srv/weights")]
    # Commands run where systemd has set nothing: they must read the rest of the file all the same.
    assert a_config(tmp_path, text).security.server_key == tmp_path / "$CREDENTIALS_DIRECTORY/server"


@pytest.mark.parametrize(
    "endpoint", ["127.0.0.1:9470", "https://127.0.0.1:1", "http://127.0.0.1", "http://user@host:1", "http://h:1/x"]
)
def test_an_http_endpoint_is_an_address_and_a_port(tmp_path: Path, endpoint: str) -> None:
    assert "expected http://ADDRESS:PORT" in problems_of(tmp_path, MINIMAL + f"endpoints: {{http: '{endpoint}'}}\n")


def test_every_mistake_is_named_at_once_with_its_line(tmp_path: Path) -> None:
    text = MINIMAL.replace("catalog:", "catalogue:") + "limits: {credit: 0}\npolicy: 3\n"
    problems = problems_of(tmp_path, text)
    assert "coserve.yaml:2:1" in problems
    assert "catalog" in problems
    assert "coserve.yaml:5:" in problems


def test_environment_variables_override_single_values(tmp_path: Path) -> None:
    config = a_config(
        tmp_path,
        COSERVE_DATABASE="sqlite:///other.db",
        COSERVE_ENDPOINTS_RESULTS="tcp://127.0.0.1:6000",
        COSERVE_ENDPOINTS__INTAKE="[tcp://127.0.0.1:6001]",
        COSERVE_DEVICES_CPU_EXPERT_MEMORY="1GB",
        COSERVE_LIMITS_MAX_PIXELS="1000",
        COSERVE_CONFIG="elsewhere.yaml",
    )
    assert config.database == f"sqlite:///{tmp_path}/other.db"
    assert config.endpoints.results == "tcp://127.0.0.1:6000"
    assert config.endpoints.intake == ["tcp://127.0.0.1:6001"]
    assert config.devices["cpu"].expert_memory == 10**9
    assert config.limits.max_pixels == 1000


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("COSERVE_LIMITS_MAX_WAIT", "5", "expected a duration such as 500ms, 20s, 2m, 12h or 30d, found `5`"),
        ("COSERVE_LIMITS_MAX_WAIT", "1:30", "found `1:30`"),
        ("COSERVE_LIMITS_MAX_WAIT", "[", "not YAML"),
        ("COSERVE_LIMITS_CREDIT", "0", "found `0`"),
        ("COSERVE_ENDPOINTS_CONTROL", "tcp://127.0.0.1:1", "control is reached over ipc only"),
    ],
)
def test_a_mistake_in_an_environment_variable_is_said_of_it_and_not_of_the_file(
    tmp_path: Path, name: str, value: str, text: str
) -> None:
    problems = problems_of(tmp_path, MINIMAL, **{name: value})
    assert problems.startswith(f"environment variable {name}:")
    assert text in problems
    assert "coserve.yaml" not in problems


def test_a_misspelt_environment_variable_is_a_mistake(tmp_path: Path) -> None:
    problems = problems_of(tmp_path, MINIMAL, COSERVE_DATABASES="sqlite:///x.db")
    assert "COSERVE_DATABASES" in problems
    assert "COSERVE_DATABASE?" in problems


@pytest.mark.parametrize(
    ("section", "says"),
    [
        ("endpoints: {control: tcp://127.0.0.1:1}", "control is reached over ipc only"),
        ("endpoints: {results: 127.0.0.1}", "expected an endpoint such as"),
        ("database: 'sqlite://'", "results in memory are lost"),
        ("security: {server_key: a}", "both server_key and allowed_clients"),
        ("models: {a: {checkpoint: m}}", "memory"),
        ("models: {a: {checkpoint: m, memory: 1MB, mode: swapmo}}", "'swapmoe', 'emoe' or 'brownout', found `swapmo`"),
        ("models: {a: {checkpoint: m, memory: 1MB, device: cuda:1}}", "'cuda:1' is not one of `devices`: cpu"),
        ("models: {a: {checkpoint: m, memory: 1MB, least_memory: 2MB}}", "2.0 MB are more than `memory`, 1.0 MB"),
        ("models: {a b: {checkpoint: m, memory: 1MB}}", "should match pattern"),
        ("models: 5", "coserve.yaml:5:9: expected"),
        ("consumers: true", "coserve.yaml:5:12: expected"),
        ("limits: {max_pixels: 1073741825}", "coserve.yaml:5:22: expected a number ≤ 1073741824, found `1073741825`"),
        ("limits: {backlog_bytes: 1000000000000000}", "coserve.yaml:5:25: expected a size of 64TiB at most"),
        (f"retention: {{free: {'9' * 400}}}", "expected a size of 64TiB at most"),
        ("retention: {images_for: 101y}", "coserve.yaml:5:25: expected a duration of 100y at most, found `101y`"),
        ("retention: {sample: inf}", "coserve.yaml:5:21: expected a number"),
        ("guards: {repeated_picture: on}", "coserve.yaml:5:28: expected"),
        ("guards: {retest_after: 2}", "expected a duration such as"),
        ("guards: {picture_quality: maybe}", "coserve.yaml:5:27: expected"),
        ('guards: {may_repeat: ["a b"]}', "should match pattern"),
        ('consumers: {"a\\u202eb": {}}', r"coserve.yaml:5:13: expected text without \u202e,"),
    ],
)
def test_values_that_cannot_be_are_refused(tmp_path: Path, section: str, says: str) -> None:
    assert says in problems_of(tmp_path, MINIMAL + section + "\n")


@pytest.mark.parametrize("off", ["0", "off", "false"])
def test_each_guard_can_be_switched_off(tmp_path: Path, off: str) -> None:
    keys = ("repeated_picture", "retest_after", "picture_quality", "unlike_training")
    guards = a_config(tmp_path, MINIMAL + f"guards: {{{', '.join(f'{key}: {off}' for key in keys)}}}\n").guards
    assert not any(getattr(guards, key) for key in keys)
    assert a_config(tmp_path, MINIMAL + "guards: {picture_quality: on}\n").guards.picture_quality is True


def test_memory_for_experts_comes_from_the_file_or_from_a_profile(tmp_path: Path) -> None:
    assert "coserve.yaml:4:8: missing key `expert_memory`" in problems_of(
        tmp_path, MINIMAL.replace("expert_memory: 250MB", "threads: 1")
    )
    config = a_config(tmp_path, MINIMAL.replace("expert_memory: 250MB", "profile: measured/here.yaml"))
    assert config.devices["cpu"].profile == tmp_path / "measured/here.yaml"


def test_a_host_cache_is_for_gpus(tmp_path: Path) -> None:
    problems = problems_of(tmp_path, MINIMAL.replace("250MB", "250MB, host_cache: 1GB"))
    assert "coserve.yaml:4:" in problems
    assert "the experts of cpu are in RAM already" in problems
    config = a_config(tmp_path, MINIMAL + "  cuda:0: {expert_memory: 8GiB, host_cache: 16GB, activation_memory: 2GB}\n")
    assert config.devices["cuda:0"].host_cache == 16 * 10**9
    assert config.devices["cuda:0"].activation_memory == 2 * 10**9


@pytest.mark.parametrize(
    ("device", "problem"),
    [
        ("cuda:0: {expert_memory: 1GB, memory: shared, host_cache: 1GB}", "the experts of cuda:0 are in RAM already"),
        ("cuda:0: {memory: shared, profile: here.yaml}", "write expert_memory beside `memory: shared`"),
        ("cuda:0: {expert_memory: 1GB, memory: unified}", "expected 'own' or 'shared'"),
    ],
)
def test_a_gpu_that_shares_the_hosts_memory_names_its_part_and_caches_nothing(
    tmp_path: Path, device: str, problem: str
) -> None:
    assert problem in problems_of(tmp_path, MINIMAL + f"  {device}\n")


def test_a_setting_of_gpus_is_refused_for_the_cpu(tmp_path: Path) -> None:
    problem = "coserve.yaml:4:39: only a GPU can have `memory: shared`"
    assert problem in problems_of(tmp_path, MINIMAL.replace("250MB", "250MB, memory: shared"))


def test_changed_added_and_removed_settings_are_named_by_key(tmp_path: Path) -> None:
    path = tmp_path / "coserve.yaml"
    files = {"rules": "rules.yaml", "catalog": "catalog.yaml"}
    gpu = {"cuda:0": {"expert_memory": "1GB"}}
    at_start = {**files, "devices": {"cpu": {"expert_memory": "100MB", "executors": 2}, **gpu}}
    path.write_text(yaml.safe_dump(at_start), encoding="utf-8")
    settings = StartSettings(path)
    path.write_text("# a comment changes nothing\n" + yaml.safe_dump(at_start), encoding="utf-8")
    assert settings.changed() == ([], [])
    now = {**files, "devices": {"cpu": {"expert_memory": "0.1GB", "executors": 1}}, "security": {"http_token": "token"}}
    path.write_text(yaml.safe_dump(now), encoding="utf-8")
    assert settings.changed() == (["devices.cpu.executors", "devices.cuda:0", "security.http_token"], [])


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("timezone: Europe/Berln", "expected a time zone such as Europe/Berlin; did you mean Europe/Berlin?"),
        ("timezone: ../../etc/passwd", "expected a time zone"),
        ("shifts: {early: 25:00}", "expected a time of day from 00:00 to 23:59, found `25:00`"),
        ("shifts: {early@1: 06:00}", "expected a name of at most 32 letters"),
        ("shifts: {early: 06:00, late: 06:00}", "begins at 06:00, as early does"),
    ],
)
def test_a_mistake_in_the_plants_clock_is_named_with_its_line(tmp_path: Path, entry: str, message: str) -> None:
    problems = problems_of(tmp_path, MINIMAL + f"plant: {{{entry}}}\n")
    assert f"{tmp_path}/coserve.yaml:5:" in problems
    assert message in problems


@pytest.mark.parametrize(
    ("database", "told"),
    [
        ("postgresql://coserve:s3cret/@h:un@db.plant:5432/line", "postgresql://coserve:***@db.plant:5432/line"),
        ("postgresql://db.plant/line?user=a&password=s3cret&sslmode=require", "?user=a&password=***&sslmode=require"),
    ],
)
def test_what_the_settings_state_is_told_without_passwords(tmp_path: Path, database: str, told: str) -> None:
    (tmp_path / "coserve.yaml").write_text(f"{MINIMAL}consumers: {{hub: {{database: {database}}}}}\n", encoding="utf-8")
    stated = stated_settings(tmp_path / "coserve.yaml", {"COSERVE_LIMITS_BACKLOG_IMAGES": "55"})
    assert told in stated.pop("consumers.hub.database")
    assert stated == {
        "rules": '"rules.yaml"',
        "catalog": '"experts/catalog.yaml"',
        "devices.cpu.expert_memory": '"250MB"',
        "limits.backlog_images": "55",
    }


CLUSTER = "cluster: {address: 'head.lan:6379', token: keys/ray}\n"


def test_a_device_of_another_pc_has_a_name_of_its_own_and_its_host(tmp_path: Path) -> None:
    config = a_config(tmp_path, MINIMAL + "  pc2-gpu: {host: pc2, expert_memory: 12GB}\n" + CLUSTER)
    assert (config.devices["pc2-gpu"].worker, config.devices["pc2-gpu"].processor) == ("pc2", "cuda:0")
    assert config.cluster.token == tmp_path / "keys/ray"
    environ = {"COSERVE_DEVICES_PC2_GPU_HOST": "pc2/cpu", "COSERVE_CLUSTER_ADDRESS": "10.0.0.1:6379"}
    config = load_config(tmp_path / "coserve.yaml", environ)
    assert (config.devices["pc2-gpu"].processor, config.cluster.address) == ("cpu", "10.0.0.1:6379")


@pytest.mark.parametrize(
    ("device", "cluster", "problem"),
    [
        ("pc2-gpu: {expert_memory: 1GB}", CLUSTER, "coserve.yaml:5:12: pc2-gpu is not a device of this PC"),
        ("pc2-gpu: {expert_memory: 1GB, host: pc2}", "", ":39: a device of another PC needs `cluster.address`"),
        ("cuda:0: {expert_memory: 1GB, host: pc2}", CLUSTER, "give one of another PC a name of its own, such as pc2-"),
        (
            "p: {expert_memory: 1GB, host: pc2}\n  q: {expert_memory: 1GB, host: pc2}",
            CLUSTER,
            "coserve.yaml:6:33: cuda:0 of pc2 is already p: name another",
        ),
        ("ram: {expert_memory: 1GB, host: pc2}", CLUSTER, "ram is the memory of this PC"),
        ("p: {expert_memory: 1GB, host: pc2/gpu}", CLUSTER, "coserve.yaml:5:"),
        ("p: {expert_memory: 1GB, host: pc2, host_cache: 1GB}", CLUSTER, "is for GPUs of this PC: remove it"),
        ("p: {expert_memory: 1GB, host: '../x'}", CLUSTER, "coserve.yaml:5:33:"),
        ("p: {expert_memory: 1GB, host: pc2}", "cluster: {address: head}\n", "address"),
    ],
)
def test_mistakes_in_devices_of_other_pcs_are_named(tmp_path: Path, device: str, cluster: str, problem: str) -> None:
    assert problem in problems_of(tmp_path, MINIMAL + f"  {device}\n{cluster}")


def test_a_language_model_runs_on_the_lines_own_pc(tmp_path: Path) -> None:
    model = "models:\n  report: {checkpoint: moe, memory: 1GB, device: p}\n"
    device = "  p: {expert_memory: 1GB, host: pc2}\n"
    assert "p is on another PC" in problems_of(tmp_path, MINIMAL + device + CLUSTER + model)
