from tests.train.conftest import no_report, tiny  # noqa: F401 (fixtures)
