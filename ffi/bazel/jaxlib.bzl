"""Finds the XLA FFI headers that the installed jaxlib ships.

The Python asked is $PYTHON_BIN_PATH, else the workspace's .venv, else python3.
"""

_BUILD = """
cc_library(
    name = "ffi",
    hdrs = glob(["xla/ffi/api/*.h"]),
    includes = ["."],
    visibility = ["//visibility:public"],
)
"""

_PRINT_FOLDER = "import pathlib, jaxlib; print(pathlib.Path(jaxlib.__file__).parent / 'include')"

def _jaxlib_headers(ctx):
    python = ctx.os.environ.get("PYTHON_BIN_PATH", "")
    if not python:
        workspace = ctx.path(Label("//ffi:BUILD.bazel")).dirname.dirname
        local = ctx.path(str(workspace) + "/.venv/bin/python")
        python = str(local) if local.exists else "python3"
    result = ctx.execute([python, "-c", _PRINT_FOLDER])
    if result.return_code != 0:
        fail("%s has no jaxlib; set PYTHON_BIN_PATH to one that has: %s" % (python, result.stderr))
    ctx.symlink(result.stdout.strip() + "/xla", "xla")
    ctx.file("BUILD.bazel", _BUILD)

jaxlib_headers = repository_rule(
    implementation = _jaxlib_headers,
    environ = ["PYTHON_BIN_PATH"],
    local = True,
)
