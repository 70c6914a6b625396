"""The C that is written, compiled and kept: elementary functions, the compiler, the switch, the cache."""

import ctypes
import os
import warnings

import numpy as np
import pytest
import torch

import dcnet
from dcnet.ops.cpu import native_depthwise
from dcnet.ops.cpu.native import compiler, source
from dcnet.util.cache import cache_folder

needs_compiler = pytest.mark.skipif(compiler.find_compiler() is None, reason="there is no C compiler")

# name in elementary.h: NumPy's function, and the range to look at closely
FUNCTIONS = {
    "exponential": (np.exp, -20.0, 20.0),
    "hyperbolic_tangent": (np.tanh, -9.0, 9.0),
    "arc_sine": (np.arcsin, -1.0, 1.0),
    "logarithm": (np.log, 0.0, 10.0),
    "logarithm_of_1_plus": (np.log1p, -0.99, 10.0),
}
SPECIAL = [0.0, -0.0, np.inf, -np.inf, np.nan, 1e-45, -1e-45, 1e-40, 1.0, -1.0, 3e38, -3e38, 88.7, 89.0, -87.0, -104.0]


@pytest.fixture
def fresh(monkeypatch, tmp_path):
    """A cache folder of its own, and nothing compiled yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(compiler.SWITCH, raising=False)
    monkeypatch.setattr(compiler, "_failed", [])
    monkeypatch.setattr(compiler, "_loaded", {})
    monkeypatch.setattr(compiler, "FEWEST", 1)
    for function in (compiler.find_compiler, native_depthwise._compiled):
        function.cache_clear()
    yield tmp_path / "dcnet" / "native"
    monkeypatch.undo()
    for function in (compiler.find_compiler, native_depthwise._compiled):
        function.cache_clear()


def elementwise(*names):
    """Compile loops over the functions of these names."""
    loops = [
        f"void each_{name}(long n, const float *x, const float *p, float *y) {{\n"
        f"    for (long i = 0; i < n; i++) y[i] = {name}({'x[i], p[i]' if name == 'power' else 'x[i]'});\n}}"
        for name in names
    ]
    library = compiler.compiled("\n".join([compiler.included("elementary.h"), *loops]))

    def call(name, x, p=None):
        y = np.empty_like(x)
        given = [a if a is None else ctypes.c_void_p(a.ctypes.data) for a in (x, p, y)]
        getattr(library, f"each_{name}")(ctypes.c_long(len(x)), *given)
        return y

    return call


def ulps(found, exact):
    """The distance in units in the last place of float32; at most a half where rounding gives just that."""
    with np.errstate(all="ignore"):
        rounded = exact.astype(np.float32)
        distance = np.abs(found.astype(np.float64) - exact) / np.spacing(np.abs(rounded))
    return np.where((found == rounded) | (np.isnan(found) & np.isnan(rounded)), 0.0, distance)


@needs_compiler
def test_elementary_functions():
    call, rng = elementwise(*FUNCTIONS), np.random.default_rng(0)
    anything = rng.integers(0, 2**32, 200_000, dtype=np.uint32).view(np.float32)
    for name, (function, least, most) in FUNCTIONS.items():
        close = rng.uniform(least, most, 200_000)
        with np.errstate(all="ignore"):
            x = np.concatenate([anything, *(np.float32(v) for v in (close, close * 1e-2, SPECIAL))])
            exact = function(x.astype(np.float64))
        found = call(name, x)
        assert np.nanmax(ulps(found, exact)) < 2.0, name
        assert np.array_equal(np.isnan(found), np.isnan(exact)), name
        if name in ("hyperbolic_tangent", "arc_sine"):
            assert np.array_equal(np.signbit(call(name, -x)), ~np.signbit(found)), name
            assert np.array_equal(call(name, -x), -found, equal_nan=True), name


@needs_compiler
def test_powers():
    call, rng = elementwise("power"), np.random.default_rng(0)
    a = np.concatenate([rng.uniform(0, 2, 100_000), np.exp(rng.uniform(-69, 0, 100_000))]).astype(np.float32)
    p = rng.uniform(-3, 3, len(a)).astype(np.float32)
    assert ulps(call("power", a, p), np.power(a.astype(float), p.astype(float))).max() < 2.0
    bases, exponents = np.meshgrid(
        [0.0, np.inf, np.nan, 1.0, 2.0, 1e-40, -2.0, -0.5], [0.0, 1.0, 2.0, 3.0, -1.0, 0.5, -2.5]
    )
    a, p = (np.ascontiguousarray(v.ravel(), dtype=np.float32) for v in (bases, exponents))
    with np.errstate(all="ignore"):
        np.testing.assert_array_equal(
            call("power", a, p), np.power(a.astype(float), p.astype(float)).astype(np.float32)
        )


def test_what_has_no_line_of_c_is_refused_by_name():
    def value(d, **_):
        return (torch.erf(d),)

    with pytest.raises(source.NotInC, match="erf"):
        source.row_functions(value, value, {}, False, True, False)


def run_a_layer():
    layer = dcnet.DecoupledConv2d(6, 6, 3, padding=1, groups=6)
    return layer(torch.randn(2, 6, 8, 8, requires_grad=True)).sum().backward()


@needs_compiler
def test_what_is_compiled_is_kept_in_the_cache_folder(fresh):
    assert cache_folder() == fresh.parent
    run_a_layer()
    (library,) = fresh.glob("*.so")
    (text,) = fresh.glob("*.c")
    assert text.stem == library.stem
    assert os.name == "nt" or fresh.stat().st_mode & 0o077 == 0  # what is executed is nobody else's to change
    assert "forward_row" in text.read_text()
    before = library.stat().st_mtime_ns
    compiler._loaded.clear()
    native_depthwise._compiled.cache_clear()
    run_a_layer()
    assert sorted(fresh.iterdir()) == sorted([library, text])
    assert library.stat().st_mtime_ns == before


@needs_compiler
def test_the_switch(fresh, monkeypatch):
    monkeypatch.setenv("DCNET_NATIVE", "0")
    run_a_layer()
    assert not fresh.exists()


def test_a_compiler_that_fails_is_named_once(fresh, monkeypatch):
    monkeypatch.setenv("CC", "python -c 'raise SystemExit(\"no such luck\")'")
    with pytest.warns(UserWarning, match="(?s)PyTorch's operations.*python -c.*no such luck.*DCNET_NATIVE=0"):
        run_a_layer()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run_a_layer()
        dcnet.DecoupledConv2d(6, 6, 3, groups=6, angular="linear")(torch.randn(2, 6, 8, 8))
    assert not list(fresh.iterdir())


def test_a_cache_folder_that_cannot_be_written(fresh, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    if compiler.find_compiler() is not None:
        with pytest.warns(UserWarning, match="file"):
            run_a_layer()


def test_without_a_compiler_nothing_is_said(fresh, monkeypatch):
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(compiler.shutil, "which", lambda name: None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run_a_layer()
    assert not fresh.exists()
