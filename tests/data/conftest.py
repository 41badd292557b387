from tests.train.conftest import train  # noqa: F401
