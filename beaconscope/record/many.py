"""Record many prompts with many workers, each of which loads the model once.

1. A task is one batch of prompts; it travels as text, options and paths, never as tensors.
2. A worker keeps the model that it has loaded, and where there are GPUs and none is named, a GPU that no other worker
   of the same run on its machine has.
3. A trace appears when it is whole. A worker that dies leaves the traces that it has finished, and of the prompts that
   it was at a journal; another worker records these anew.
"""

from __future__ import annotations

import functools
import os
import tempfile
import threading
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO
from urllib.parse import quote

import torch
from transformers import PreTrainedTokenizerBase

from beaconscope.engines import Engine, WorkersDied, check_engine, run_tasks
from beaconscope.errors import BeaconScopeError, UsageError
from beaconscope.files import lock_now
from beaconscope.models import LoadedModel, LoadOptions, load_model, load_tokenizer, local_path
from beaconscope.progress import Note, Progress
from beaconscope.record.encode import check_prompts
from beaconscope.record.options import RecordOptions
from beaconscope.record.prompts import Prompt
from beaconscope.record.record import record_prompts
from beaconscope.record.traces import find_unfinished, prompt_batches, traces_folder

_TURN = threading.Lock()


def record_with_workers(
    load: LoadOptions,
    prompts: Sequence[Prompt],
    options: RecordOptions,
    *,
    folder: str | Path,
    batch_size: int = 1,
    force: bool = False,
    workers: int = 1,
    engine: Engine = "loky",
    address: str | None = None,
    progress: Progress | None = None,
    note: Note | None = None,
) -> list[Path]:
    """Record many prompts as :func:`~.record.record_prompts` does, spread over workers.

    Parameters
    ----------
    load
        The model, which every worker loads for itself.
    prompts, options, folder, batch_size, force
        As in :func:`~.record.record_prompts`. Every worker must see the folder, and a local model, under the same path.
    workers, engine, address
        As in :func:`~beaconscope.engines.run_tasks`.
    progress
        Told how many prompts are recorded.
    note
        Told what is worth knowing.

    Returns
    -------
    list of Path
        The traces in the order of ``prompts``, those that were there before too.

    Raises
    ------
    BeaconScopeError
        As :func:`~.record.record_prompts`, or where workers keep dying or the cluster is not there. What is finished
        stays, and the same call goes on with the rest.
    KeyboardInterrupt
        After SIGINT (Ctrl-C); the message says how far it was.
    """
    check_engine(engine, workers, address)
    if batch_size < 1:
        raise UsageError(f"batch-size is {batch_size}; give at least 1")
    if load.device_map is not None:
        raise UsageError(
            "--device-map spreads one model over all devices, and here each worker has its own; leave it out"
        )
    paths, unfinished = find_unfinished(prompts, Path(folder), force=force, note=note)
    folder = Path(folder).absolute()
    if os.path.exists(local := local_path(load.model)):
        load = replace(load, model=str(local.absolute()))
    if unfinished and engine == "loky":
        # Here once, before each worker loads a model; on a cluster the files may not be on this machine.
        check_prompts(load_tokenizer(load), unfinished, options)
    run = uuid.uuid4().hex
    tasks = {
        batch[0].id: _Batch(load, tuple(batch), options, folder, run)
        for batch in prompt_batches(unfinished, batch_size)
    }
    report = progress or (lambda done, total: None)
    done, said = len(prompts) - len(unfinished), set[str]()
    report(done, len(prompts))
    with traces_folder(folder):
        try:
            for name, notes in run_tasks(tasks, workers=workers, engine=engine, address=address, gpus=_wants_gpu(load)):
                for text in notes:
                    if note is not None and text not in said:
                        note(text)
                    said.add(text)
                done += len(tasks[name].prompts)
                report(done, len(prompts))
        except WorkersDied as error:
            raise WorkersDied(f"{error}; what is recorded is kept: the same command goes on with the rest") from error
        except KeyboardInterrupt:
            raise KeyboardInterrupt(
                f"stopped with {done} of {len(prompts)} prompts recorded; the same command goes on with the rest"
            ) from None
    return [path for path in paths.values() if path.exists()]


@dataclass(frozen=True)
class _Batch:
    """Prompts to be recorded together, by whichever worker."""

    load: LoadOptions
    prompts: tuple[Prompt, ...]
    options: RecordOptions
    folder: Path
    run: str

    def __call__(self) -> list[str]:
        """Record them; what is worth knowing of it."""
        notes: list[str] = []
        # Where a worker of a cluster has several threads, they take turns: there is one model.
        with _TURN:
            check_prompts(_tokenizer(self.load, self.run), self.prompts, self.options)
            worker = _worker(self.load, self.run)
            record_prompts(
                worker.loaded.model,
                worker.loaded.tokenizer,
                self.prompts,
                self.options,
                folder=self.folder,
                batch_size=len(self.prompts),
                force=True,
                model_id=worker.loaded.id,
                revision=worker.loaded.revision,
                note=notes.append,
            )
        return notes


@dataclass(frozen=True)
class _Worker:
    """What a worker keeps from one batch to the next."""

    loaded: LoadedModel
    claim: IO[bytes] | None
    """An open file whose lock says that the GPU is taken; the system lets go of it when the process ends."""


@functools.lru_cache(maxsize=1)
def _tokenizer(load: LoadOptions, run: str) -> PreTrainedTokenizerBase:
    return load_tokenizer(load)


@functools.lru_cache(maxsize=1)
def _worker(load: LoadOptions, run: str) -> _Worker:
    claim = None
    tokenizer = _tokenizer(load, run)
    if _wants_gpu(load) and torch.cuda.is_available():
        index, claim = claim_gpu(run, torch.cuda.device_count())
        load = replace(load, device=f"cuda:{index}")
    return _Worker(load_model(load, tokenizer), claim)


def _wants_gpu(load: LoadOptions) -> bool:
    """Whether any GPU will do."""
    return load.device in ("auto", "cuda")


def claim_gpu(run: str, count: int, folder: Path | None = None) -> tuple[int, IO[bytes]]:
    """Take a GPU of this machine that no other worker of a run has.

    Parameters
    ----------
    run
        Identifies the run.
    count
        GPUs that this process sees.
    folder
        Where locks lie; default the machine's folder for temporary files.

    Returns
    -------
    int
        Index of the GPU.
    file
        The lock, which is held as long as it is open.

    Raises
    ------
    BeaconScopeError
        When all are taken.
    """
    folder = Path(tempfile.gettempdir()) if folder is None else folder
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    for index in range(count):
        # Processes that see different GPUs under the same index do not get into each other's way.
        name = visible[index] if index < len(visible) and visible[index] else str(index)
        # That of a part of a GPU may hold slashes.
        path = folder / f"beaconscope-{run}-{quote(name.strip(), safe='')}.lock"
        file = path.open("ab")
        try:
            lock_now(file)
        except OSError:
            file.close()
            continue
        return index, file
    raise BeaconScopeError(f"all {count} GPUs have a worker already; give at most {count} --jobs, or --device cpu")
