"""A store in which one call, before or after its effect, stops the process until it is killed; see jobs."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.helpers.background import Hooked, calls_of

__all__ = ["Mined", "mined"]


class Mined(Hooked):
    """A directory whose calls are noted, in the writer process and in the training's; at number `at` all stops."""

    def hook(self, name: str, effect: Callable[[], Any]) -> Any:
        with open(self.log, "a") as log:
            log.write(f"{name}\n")
        now = len(calls_of(self.log)) - 1 == self.at
        if now and not self.after:
            self.stop(name)
        result = effect()
        if now and self.after:
            self.stop(name)
        return result

    def stop(self, name: str) -> None:
        met = self.log.with_suffix(".met")
        met.with_suffix(".tmp").write_text(json.dumps([os.getpid(), name]))
        os.rename(met.with_suffix(".tmp"), met)
        time.sleep(600)

    def __reduce__(self) -> Any:
        return mined, (self.directory, self.log, self.at, self.after)

    def prepare(self) -> None:
        self.hook("prepare", lambda: super(Mined, self).prepare())

    def sizes(self) -> dict[str, int]:
        return self.hook("sizes", lambda: super(Mined, self).sizes())

    def read(self, name: str, *, limit: int) -> bytes:
        return self.hook(f"read {name}", lambda: super(Mined, self).read(name, limit=limit))

    def delete(self, name: str) -> None:
        self.hook(f"delete {name}", lambda: super(Mined, self).delete(name))


def mined(directory: Path, log: Path, at: int | None, after: bool) -> Mined:
    return Mined(directory, log, at, after=after)
