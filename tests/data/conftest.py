from energynn.data import describe  # noqa: F401  its paths are those of the project
from tests.train.conftest import train  # noqa: F401
