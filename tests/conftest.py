"""One Hypothesis profile for the whole suite: no deadlines, which shared machines miss, and moderate numbers of examples."""

from hypothesis import HealthCheck, settings

settings.register_profile(
    "suite",
    deadline=None,
    max_examples=60,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile("suite")
