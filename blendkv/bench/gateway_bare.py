"""The least that serves files by Starlette, for comparison: `python -m blendkv.bench.gateway_bare FOLDER`."""

from __future__ import annotations

import os
import socket
import sys


def main(folder: str) -> None:
    """Serves the files of a folder by `FileResponse`, on a port that it prints."""
    import uvicorn
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import FileResponse
    from starlette.routing import Route

    async def answer(request: Request) -> FileResponse:
        return FileResponse(os.path.join(folder, request.path_params["path"]))

    app = Starlette(routes=[Route("/chunks/{path:path}", answer)])
    with socket.create_server(("127.0.0.1", 0), backlog=1024) as sock:
        print(sock.getsockname()[1], flush=True)
        uvicorn.Server(uvicorn.Config(app, log_level="warning", access_log=False)).run(sockets=[sock])


if __name__ == "__main__":
    main(sys.argv[1])
