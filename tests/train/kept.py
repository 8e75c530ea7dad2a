"""What services keep of a run, read back from where they keep it."""

import json
import struct
from collections.abc import Iterator
from pathlib import Path


def of_tensorboard(folder: Path) -> dict:
    """Losses as (step, loss), the names of scalars, and texts by name and step; of one run below ``folder``."""
    from tensorboard.backend.event_processing.event_accumulator import TENSORS, EventAccumulator

    (run,) = (folder / "tensorboard").iterdir()
    events = EventAccumulator(str(run), size_guidance={TENSORS: 0}).Reload()
    texts = {
        (tag.removesuffix("/text_summary"), event.step): event.tensor_proto.string_val[0].decode()
        for tag in events.Tags()["tensors"]
        for event in events.Tensors(tag)
    }
    losses = [(scalar.step, scalar.value) for scalar in events.Scalars("train/loss")]
    return {"losses": losses, "metrics": set(events.Tags()["scalars"]), "texts": texts}


def of_wandb(folder: Path) -> dict:
    """The same of the runs that were kept offline in ``folder``, one after the other, with their ids and exit codes."""
    from wandb.proto.wandb_internal_pb2 import Record

    found: dict = {"losses": [], "metrics": set(), "ids": [], "exits": [], "tags": set(), "config": {}}
    for file in sorted((folder / "wandb").glob("offline-run-*/*.wandb"), key=lambda file: file.stat().st_mtime):
        for data in _log_records(file.read_bytes()):
            record = Record.FromString(data)
            if record.HasField("run"):
                found["ids"].append(record.run.run_id)
                found["tags"] |= set(record.run.tags)
                found["config"] |= {item.key: json.loads(item.value_json) for item in record.run.config.update}
            if record.HasField("exit"):
                found["exits"].append(record.exit.exit_code)
            items = {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
            found["metrics"] |= {key for key in items if not key.startswith("_")}
            if "train/loss" in items:
                found["losses"].append((int(items["_step"]), float(items["train/loss"])))
    return found


def _log_records(content: bytes) -> Iterator[bytes]:
    """Records of LevelDB's log format, which follow a header of 7 bytes."""
    place, whole = 7, b""
    while place + 7 <= len(content):
        if (left := 32768 - place % 32768) < 7:
            place += left
            continue
        size, kind = struct.unpack_from("<HB", content, place + 4)
        whole += content[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in (1, 4):  # whole, or the last part
            yield whole
            whole = b""


def of_mlflow(url: str, *, project: str) -> dict:
    """The same of the one run of ``project``, with its tags, parameters, status and files of answers."""
    import mlflow

    client = mlflow.MlflowClient(url)
    (run,) = client.search_runs([client.get_experiment_by_name(project).experiment_id])
    history = client.get_metric_history(run.info.run_id, "train/loss")
    answers = {}
    for file in client.list_artifacts(run.info.run_id, "answers"):
        local = mlflow.artifacts.download_artifacts(run_id=run.info.run_id, artifact_path=file.path, tracking_uri=url)
        answers[file.path] = json.loads(Path(local).read_text(encoding="utf-8"))
    return {
        "losses": [(metric.step, metric.value) for metric in history],
        "metrics": set(run.data.metrics),
        "tags": run.data.tags,
        "params": run.data.params,
        "name": run.info.run_name,
        "status": run.info.status,
        "answers": answers,
    }


def of_trackio(project: str) -> dict:
    """The same of the one run of ``project`` below ``TRACKIO_DIR``."""
    from trackio import Api
    from trackio.sqlite_storage import SQLiteStorage

    (run,) = Api().runs(project)
    rows = SQLiteStorage.get_logs(project, run.name, run_id=run.id)
    return {
        "losses": [(row["step"], row["train/loss"]) for row in rows if "train/loss" in row],
        "metrics": {key for row in rows for key in row} - {"step", "timestamp"},
        "answers": {row["step"]: row["answers"]["_value"] for row in rows if "answers" in row},
        "config": run.config,
    }
