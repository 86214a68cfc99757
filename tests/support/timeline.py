"""A virtual GPU: a host clock and a device clock, queued work, events, graphs. For the CUDA clock's tests."""

from types import SimpleNamespace


class Timeline:
    """Seconds on the host and on the device. A call costs the host time; its work waits for the device.

    ``warm``, ``cold``: seconds of one step with its data in the L2, or after a read of more than it holds.
    A write of that much leaves lines that the next step must write back (``dirty`` seconds).
    """

    def __init__(self, warm, cold=None, launch=8e-6, record=1.5e-6, capture_fails=False):
        self.host = self.device = 0.0
        self.warm, self.cold = warm, warm if cold is None else cold
        self.launch, self.record_cost, self.capture_fails = launch, record, capture_fails
        self.evicted, self.capturing, self.stream = False, None, "default"
        self.steps = 0

    def work(self, seconds, cost=None):
        self.host += self.launch if cost is None else cost
        self.device = max(self.device, self.host) + seconds

    def step(self):
        """What is measured: one kernel."""
        if self.capturing is not None:
            self.capturing.append(1)
        else:
            self.steps += 1
            self.work(self._step_seconds(), 3 * self.launch)

    def _step_seconds(self):
        seconds = self.cold if self.evicted else self.warm
        self.evicted = False
        return seconds

    def read_everything(self, *args, **kwargs):
        self.work(60e-6)
        self.evicted = True

    def torch(self, real):
        """``torch`` as the clock sees it."""
        timeline = self

        class Event:
            def __init__(self, enable_timing=False):
                self.at = None

            def record(self):
                timeline.host += timeline.record_cost
                self.at = timeline.device = max(timeline.device, timeline.host)

            def elapsed_time(self, other):
                return (other.at - self.at) * 1e3

        class Graph:
            def replay(self):
                timeline.host += timeline.launch
                timeline.device = max(timeline.device, timeline.host)
                for _ in self.nodes:
                    timeline.device += timeline._step_seconds()
                    timeline.steps += 1

        class Capture:
            def __init__(self, graph):
                self.graph = graph

            def __enter__(self):
                timeline.capturing, self.before = [], timeline.stream
                timeline.stream = "capture"

            def __exit__(self, *exc):
                self.graph.nodes, timeline.capturing = timeline.capturing, None
                if timeline.capture_fails:  # as torch does: the stream is left as it is
                    raise RuntimeError("operation not permitted when stream is capturing\nmore")
                timeline.stream = self.before

        class Context:
            def __init__(self, *args):
                pass

            def __enter__(self):
                return self

            def __exit__(self, *exc):
                return None

            def wait_stream(self, other):
                return None

        def synchronize(*args):
            timeline.host = max(timeline.host, timeline.device)

        cuda = SimpleNamespace(
            is_available=lambda: True,
            device_count=lambda: 1,
            device=Context,
            stream=Context,
            Stream=Context,
            Event=Event,
            CUDAGraph=Graph,
            graph=Capture,
            synchronize=synchronize,
            current_stream=lambda: Stream(timeline.stream),
            set_stream=lambda stream: setattr(timeline, "stream", stream.name),
            get_device_properties=lambda device: SimpleNamespace(L2_cache_size=50 << 20),
        )

        class Stream(Context):
            def __init__(self, name="side"):
                self.name = name

        names = {"device": real.device, "float32": real.float32, "uint8": real.uint8, "__version__": "2.13"}
        return SimpleNamespace(**names, cuda=cuda, zeros=lambda *a, **k: object(), sum=self.read_everything)
