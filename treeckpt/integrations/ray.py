"""Checkpoints of Ray Train (2.60 or later) that Ray learns of once they are committed. Needs `ray[train]`.

    import treeckpt.integrations.ray as tc_ray

    def train(config):  # the training function of a TorchTrainer
        model, optimizer = build(config)
        with tc_ray.manager(every=100) as manager:
            tc_ray.restore(manager, model, optimizer)  # nothing on a first run
            for step in range(manager.count + 1, config["steps"] + 1):
                loss = step_of(model, optimizer)
                if manager.should_save(step):
                    tc_ray.report({"loss": loss}, manager, step, tc.training.state(model, optimizer))

The workers save their shards straight into the directory of Ray's run, in the background, and may be of another number
when they restore. Nothing is copied by Ray. A worker that is killed inside a save leaves nothing in Ray's list.

Ray decides which checkpoints stay, by `CheckpointConfig(num_to_keep=...)`: with fewer than 2 there is none to fall back
to. Training functions run in threads, which catch no signals: call `manager.save_on_signal(())` before the loop, and in
it `manager.request_save()` where, say, `ray.train.get_preemption_info()` returns something.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from numbers import Real
from typing import Any

import ray.train  # pyright: ignore[reportMissingImports]

import treeckpt as tc

__all__ = ["manager", "report", "restore"]

_URLS = {"s3": "s3://", "gcs": "gs://", "abfs": "az://"}
"""How URLs begin, by the name of the file system of pyarrow that Ray made of one."""


def manager(**options: Any) -> tc.Manager:
    """Returns a manager of the checkpoints in the directory of Ray's run; called by every worker.

    Args:
        options: those of `treeckpt.Manager`, but for `run`, `keep` and `incremental`.

    Raises:
        TreeckptError: Ray stores the run in a file system of another kind than a directory, S3, GCS or Azure; or `keep`
            or `incremental` was given: Ray deletes checkpoints, whatever refers to them, and misses those of its list.
    """
    storage: Any = ray.train.get_context().get_storage()
    kind, path = storage.storage_filesystem.type_name, storage.experiment_fs_path
    if refused := [f"{name}={options[name]!r}" for name in ("keep", "incremental") if name in options]:
        hint = "Give the trainer RunConfig(checkpoint_config=CheckpointConfig(num_to_keep=...))"
        expected = "whole checkpoints, of which Ray deletes the old ones"
        raise tc.TreeckptError(path, expected=expected, found=", ".join(refused), hint=hint)
    if kind != "local" and kind not in _URLS:
        hint = "Use a RunConfig(storage_path=...) of one of these, without storage_filesystem"
        raise tc.TreeckptError(path, expected=f"a file system local or {', '.join(_URLS)}", found=kind, hint=hint)
    return tc.Manager(_URLS.get(kind, "") + path, keep=None, **options)


def report(
    metrics: Mapping[str, Any],
    manager: tc.Manager,
    step: int,
    tree: Any = ...,
    *,
    validation: Any = False,
    **options: Any,
) -> None:
    """Saves a step and reports it to Ray once it is committed; called by every worker in the place of Ray's `report`.

    Returns as soon as the tree may change. A step that is in Ray's list from before a restore of an earlier one keeps
    its place there.

    Args:
        metrics: for Ray; the numbers of them are the metrics of the checkpoint, too.
        manager: as `manager` returns it; its run is the directory of Ray's run.
        tree: as for `Manager.save`.
        validation: as for `ray.train.report`.
        options: `pin`, `custom_metadata` and `files` of `Manager.save`.

    Raises:
        TreeckptError: the manager has another run than Ray.
        The errors of `Manager.save`; that of a save in the background is the failure of the worker.
    """
    path = manager.path(step)
    checkpoint, listed = _checkpoint(path), tc.exists(path)
    numbers = {name: float(value) for name, value in metrics.items() if isinstance(value, Real)}
    saved = manager.save(step, tree, metrics=numbers, **options)
    if listed or (isinstance(saved, tc.Pending) and saved.skipped):
        ray.train.report(dict(metrics))
        return

    def wait(*_: Any) -> Any:
        """Returns the checkpoint once it is committed; Ray calls it in a thread."""
        if isinstance(saved, tc.Pending):
            saved.result()
        return checkpoint

    ray.train.report(
        dict(metrics),
        checkpoint,
        checkpoint_dir_name=checkpoint.path.rpartition("/")[2],
        checkpoint_upload_mode=ray.train.CheckpointUploadMode.ASYNC,
        delete_local_checkpoint_after_upload=False,
        checkpoint_upload_fn=wait,
        validation=validation,
    )


def restore(manager: tc.Manager, model: Any, optimizer: Any = None, **options: Any) -> tc.training.RestoreReport | None:
    """Continues a run: as `Manager.resume`, from the newest checkpoint that is committed and loads.

    That may be one of which Ray has not heard, as its workers ended before: it is reported to Ray.

    Args:
        manager, model, optimizer, options: as for `report` and `Manager.resume`.

    Raises:
        TreeckptError: the manager has another run than Ray.
        The errors of `Manager.resume`.
    """
    found = manager.resume(model, optimizer, **options)
    if found is None:
        return None
    checkpoint, latest = _checkpoint(found.path), ray.train.get_checkpoint()
    if latest is None or latest.path != checkpoint.path:
        committed = ray.train.CheckpointConsistencyMode.COMMITTED
        listed = ray.train.get_all_reported_checkpoints(consistency_mode=committed)
        if checkpoint.path not in {one.checkpoint.path for one in listed}:
            metrics = tc.inspect(found.path).custom_metadata.get("metrics", {})
            mode = ray.train.CheckpointUploadMode.NO_UPLOAD
            ray.train.report(metrics, checkpoint, checkpoint_upload_mode=mode)
    return found


def _checkpoint(path: str) -> Any:
    """Returns Ray's name of a checkpoint."""
    storage: Any = ray.train.get_context().get_storage()
    run, _, name = path.rstrip("/").rpartition("/")
    run, place = run.partition("://")[2] or os.path.realpath(run), storage.experiment_fs_path
    if run not in (place, os.path.realpath(place)):
        hint = "Make the manager with treeckpt.integrations.ray.manager()"
        raise tc.TreeckptError(path, expected=f"a checkpoint in {place}, Ray's run", found=f"one in {run}", hint=hint)
    return ray.train.Checkpoint(f"{place}/{name}", storage.storage_filesystem)
