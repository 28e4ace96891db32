"""What routes are given besides a request's body."""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends, Request

from ..service import Service


async def _service(request: Request) -> Service:  # were it not async, it would be a thread's job
    service: Service = request.app.state.service
    return service


Served = Annotated[Service, Depends(_service)]
