"""Prometheus' text: counts, sums and rising buckets."""

from vitlab.serving.metrics import IMAGES, Histogram, Metrics


def test_buckets_rise_to_the_count() -> None:
    histogram = Histogram("batch", "Images.", IMAGES)
    for value in (1, 1, 3, 8, 500):
        histogram.observe(value)
    lines = list(histogram.lines())
    assert 'batch_bucket{le="1"} 2' in lines and 'batch_bucket{le="4"} 3' in lines and 'batch_bucket{le="8"} 4' in lines
    assert lines[-3:] == ['batch_bucket{le="+Inf"} 5', "batch_sum 513", "batch_count 5"]


def test_large_counts_are_not_rounded() -> None:
    metrics = Metrics()
    metrics.requests.add(by=1_234_567)
    metrics.batch_seconds.observe(1_234_567.25)
    text = metrics.text({})
    assert "vitlab_requests_total 1234567\n" in text and "vitlab_batch_seconds_sum 1234567.25\n" in text


def test_text_has_a_type_for_every_name() -> None:
    metrics = Metrics()
    metrics.requests.add('route="/",status="200"')
    metrics.requests.add('route="/",status="200"')
    text = metrics.text({"vitlab_ready": ("Ready.", 1.0)})
    assert 'vitlab_requests_total{route="/",status="200"} 2\n' in text and "vitlab_ready 1\n" in text
    names = {line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")}
    values = {line.partition(" ")[0].partition("{")[0] for line in text.splitlines() if not line.startswith("#")}
    assert all(any(value.startswith(name) for name in names) for value in values)
