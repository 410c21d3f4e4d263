"""Measures saves and loads of an object store over links of several latencies and rates.

The store is the server of `s3_server`, in a process of its own on this machine, over HTTPS: `https` makes a CA for it,
which clients take from the environment. Its own limit is measured too: what comes near it is a figure of the server,
not of the link. In each repetition every contender saves, loads and fills in
turn; the best of the raw ones are the limits of all.
"""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import os
import ssl
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from operator import itemgetter
from typing import Any

from tests.bench.https import Certificate, certificate
from tests.bench.remote_checkpointers import RemoteCheckpointer, left_out, remote_checkpointers
from tests.bench.results import (
    RAW,
    REMOTE_LIMITS,
    REMOTE_PHASES,
    SERVER_LINK,
    Link,
    RemoteTrial,
    with_remote_limits,
)
from tests.bench.states import SpeedTask
from treeckpt._bench.checkpointers import is_installed
from treeckpt._bench.measure import Difference, measure_work, pretouch_memory, release_memory
from treeckpt._bench.results import BenchError
from treeckpt._bench.states import State, different_leaf, make_state, shapes_bytes
from treeckpt._report.terminal import print_line
from treeckpt.demo.launch import started, worker_environment

PATIENCE = 60.0
"""Seconds for one operation. After that the server lets it end as fast as it can."""
SLOW = 10.0
"""Seconds: a turn that takes longer is waiting for the link, and is measured once."""


class FarServer:
    """The server, and the link to it.

    Args:
        port: on this machine.
        authority: the file of the CA that its certificate is of.
    """

    def __init__(self, port: int, authority: str) -> None:
        self._port, self._context = port, ssl.create_default_context(cafile=authority)
        self.endpoint = f"https://127.0.0.1:{port}"

    def set_link(self, link: Link) -> None:
        """Sets latency and rate, also for what is under way; forgets the log."""
        self._ask("POST", "/!set", {"latency": link.latency / 1e3, "rate": link.rate * 1e6})

    def log(self) -> dict[str, Any]:
        """Returns the requests since then, and the bytes that are stored."""
        return self._ask("GET", "/!log")

    def forget(self) -> None:
        """Forgets all objects."""
        self._ask("DELETE", "/!objects")

    def _ask(self, method: str, path: str, thing: object = None) -> dict[str, Any]:
        connection = http.client.HTTPSConnection("127.0.0.1", self._port, timeout=60, context=self._context)
        with contextlib.closing(connection):
            connection.request(method, path, json.dumps(thing))
            return json.loads(connection.getresponse().read())


@contextlib.contextmanager
def started_server(made: Certificate) -> Iterator[FarServer]:
    """Starts the server with a certificate, and ends it."""
    command = [sys.executable, "-m", "tests.bench.s3_server", made.chain, made.key]
    with started(command, worker_environment(os.environ)) as process:
        said = process.stdout.readline() if process.stdout else ""
        if not said.strip().isdecimal():
            raise BenchError(f"the S3 server of the benchmark did not start: {said}")
        yield FarServer(int(said), made.authority)


class _RemoteMeasurement:
    """Measures turns on one link."""

    def __init__(self, server: FarServer, link: Link, nbytes: int) -> None:
        self._server, self._link, self._nbytes = server, link, nbytes

    def turn(self, contender: RemoteCheckpointer, repetition: int, state: State, target: State) -> list[RemoteTrial]:
        """Saves, loads, fills and restores, as far as the contender does; what comes back first is compared.

        Raises:
            BenchError: it differs from what was saved.
        """
        prefix = f"{contender.name.replace(' ', '-')}-{repetition}"
        state, target = contender.prepare(state), contender.prepare(target)
        works: dict[str, Callable[[], State | None]] = {
            "save": partial(contender.save, prefix, state),
            "load": partial(contender.load, prefix, target),
            "fill": partial(_fill, contender, prefix, target),
            "restore": partial(contender.restore, prefix),
        }
        difference = partial(different_leaf, state) if repetition == 0 else None
        trials: list[RemoteTrial] = []
        for phase in REMOTE_PHASES:
            kind = phase.split()[0]
            if kind in contender.kinds:
                if kind == "fill" and difference is not None:
                    for leaf in target.values():
                        leaf.fill_(0)
                trials.append(self._trial(contender.name, phase, repetition, works[kind], difference))
        self._server.forget()
        return trials

    def _trial(
        self,
        contender: str,
        phase: str,
        repetition: int,
        work: Callable[[], State | None],
        difference: Difference | None,
    ) -> RemoteTrial:
        release_memory()
        if phase in ("load remote", "restore remote"):
            pretouch_memory(self._nbytes)
        self._server.set_link(self._link)
        timer = threading.Timer(PATIENCE, self._server.set_link, [SERVER_LINK])

        def timed() -> State | None:
            timer.start()  # on the clock: what goes on until then has taken longer than that
            return work()

        try:
            usage, summed, loaded = measure_work(timed)
        finally:
            timer.cancel()
        if loaded is not None and difference is not None and (name := difference(loaded)):
            raise BenchError(f"{contender}: {self._link.scenario}: {name} came back changed")
        log = self._server.log()
        return RemoteTrial(
            scenario=self._link.scenario,
            contender=contender,
            phase=phase,
            repetition=repetition,
            seconds=min(usage.seconds, PATIENCE),
            summed=summed,
            nbytes=self._nbytes,
            limit=REMOTE_LIMITS[phase],
            limits={},
            extra_rss=usage.extra_rss,
            read_bytes=sum(row["sent"] for row in log["log"]),
            write_bytes=sum(row.get("received", 0) for row in log["log"]),
            files_bytes=log["stored"],
            cached=0.0,
            requests=len(log["log"]),
            cut=usage.seconds > PATIENCE,
        )


def _fill(contender: RemoteCheckpointer, prefix: str, target: State) -> State:
    contender.load_into(prefix, target)
    return target


def _warm_up(contender: RemoteCheckpointer) -> None:
    """Saves and loads something small: what a library does once in a process is not on the clock."""
    state = contender.prepare(make_state({"leaf": (1024,)}))
    contender.save("warm-up", state)
    contender.load("warm-up", state)


def run_remote(task: SpeedTask) -> Iterator[list[RemoteTrial]]:
    """Measures the server's own limit, then every link; yields the trials of each turn.

    Raises:
        BenchError: what came back differs from what was saved, or the server did not start.
    """
    if not hasattr(os, "memfd_create") or not is_installed("obstore"):
        print_line("object stores are left out: they need Linux and obstore (pip install 'treeckpt[object]')")
        return
    for sentence in left_out():
        print_line(sentence)
    state, target = make_state(task.shapes), make_state(task.shapes)
    with certificate(task.path) as made, started_server(made) as server:
        contenders = remote_checkpointers(server.endpoint)
        raw = [contender for contender in contenders if contender.name.startswith(RAW)]
        chosen = [c for c in contenders if c in raw or task.selects(c.name)]
        for contender in chosen:
            _warm_up(contender)
            server.forget()
        for link in (SERVER_LINK, *task.links):
            measurement = _RemoteMeasurement(server, link, shapes_bytes(task.shapes))
            yield from _run_link(task, measurement, raw[-1:] if link == SERVER_LINK else chosen, state, target)


def _run_link(
    task: SpeedTask,
    measurement: _RemoteMeasurement,
    contenders: Sequence[RemoteCheckpointer],
    state: State,
    target: State,
) -> Iterator[list[RemoteTrial]]:
    slow: set[str] = set()
    for repetition, turns in itertools.groupby(task.turns(contenders), key=itemgetter(0)):
        made = [measurement.turn(c, repetition, state, target) for _, c in turns if c.name not in slow]
        slow |= {trials[0].contender for trials in made if sum(trial.seconds for trial in trials) > SLOW}
        yield from with_remote_limits(made)
