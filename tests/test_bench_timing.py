"""What a timed run is, on a device whose every second is known."""

import pytest

from k3jax.bench import timing

RUN, DISPATCH, WAIT = 1e-3, 2e-4, 5e-4


class Device:
    """Half as fast while it wakes from a long idle, right after each rest, and once it is hot.

    Dispatching a run costs the host less than the run; waiting costs once a queue.
    """

    WAKING, RAISING, HOT, COOLED = 0.2, 3e-3, 3e-2, 5e-3

    def __init__(self, monkeypatch, run=RUN):
        self.run, self.now, self.free_at, self.busy = run, 0.0, 0.0, 0.0
        self.started = 0
        monkeypatch.setattr(timing.time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(timing.time, "sleep", self.sleep)

    def sleep(self, seconds):
        self.now += seconds
        if seconds >= self.COOLED:
            self.busy = 0.0

    def start(self):
        self.now += DISPATCH
        self.started += 1
        fast = self.now > self.WAKING and self.RAISING <= self.busy < self.HOT
        seconds = self.run if fast else 2 * self.run
        self.free_at = max(self.free_at, self.now) + seconds
        self.busy += seconds

    def wait(self, outputs):
        self.now = max(self.now, self.free_at) + WAIT

    def seconds(self, **options):
        return timing.device_seconds(self.start, self.wait, **options)


def test_neither_dispatch_nor_a_low_clock_nor_heat_of_what_ran_before_counts(monkeypatch):
    device = Device(monkeypatch)
    device.busy = 10.0
    assert device.seconds() == pytest.approx(RUN)


def test_without_rests_it_is_sustained_load(monkeypatch):
    assert Device(monkeypatch).seconds(rest=0) == pytest.approx(2 * RUN)


@pytest.mark.parametrize(("name", "value"), [("SETTLE", 0), ("WARM", 1e-9), ("REST", 1e-3)])
def test_what_each_measure_is_good_for(name, value, monkeypatch):
    """Without any one of them the device is not at its speed."""
    monkeypatch.setattr(timing, name, value)
    assert Device(monkeypatch).seconds(rest=timing.REST) > 1.1 * RUN


def test_a_slow_run_is_timed_once(monkeypatch):
    device = Device(monkeypatch, run=1.0)
    assert device.seconds() == pytest.approx(2.0 + DISPATCH + WAIT)
    assert device.started == 2
