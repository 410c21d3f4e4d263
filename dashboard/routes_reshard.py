"""The addresses of the reshard preview."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Request
from fastapi.responses import HTMLResponse

from . import queries
from .answers import Answers
from .render import render
from .resharding import ReshardPage, reshard_page

__all__ = ["api", "pages"]

api = Answers()
pages = APIRouter(include_in_schema=False, default_response_class=HTMLResponse)

Start = Annotated[int, Query(ge=0, le=1 << 53, description="number of the first row")]
MeshText = Annotated[str, Query(max_length=100, description="sizes of the target mesh, as `2x4`")]
Names = Annotated[str, Query(max_length=200, description="names of its dimensions, as `dp,tp`")]
Place = Annotated[
    str, Query(max_length=4000, description="rules, as `*.bias: Replicate; *: Shard(0)`; the first that matches holds")
]


@api.gives("/checkpoints/{checkpoint_id}/reshard")
def get_reshard(
    request: Request, checkpoint_id: str, mesh: MeshText = "", names: Names = "", place: Place = "", start: Start = 0
) -> ReshardPage:
    """What each rank of another mesh would read from which file."""
    return reshard_page(*queries.opened(request.app.state.library, checkpoint_id), mesh, names, place, start)


@pages.get("/checkpoints/{checkpoint_id}/reshard")
def show_reshard(
    request: Request, checkpoint_id: str, mesh: MeshText = "", names: Names = "", place: Place = "", start: Start = 0
) -> HTMLResponse:
    return render(request, "reshard.html", get_reshard(request, checkpoint_id, mesh, names, place, start))
