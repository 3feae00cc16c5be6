"""An HTTP server that is compatible with clients of OpenAI's API, on Starlette and uvicorn; see docs/http.md."""

try:
    from octavo.serve.http.app import Api
    from octavo.serve.http.errors import ApiError
    from octavo.serve.http.limits import Limits
    from octavo.serve.http.server import bind, running, serve, url_of
except ModuleNotFoundError as _error:
    _package = (_error.name or "").partition(".")[0]
    if _package not in ("prometheus_client", "pydantic", "starlette", "uvicorn"):
        raise
    raise ModuleNotFoundError(
        f"an HTTP server needs the package {_package!r}; install it with: pip install 'octavo[serve]'",
        name=_error.name,
    ) from None

__all__ = ["Api", "ApiError", "Limits", "bind", "running", "serve", "url_of"]
