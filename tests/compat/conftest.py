"""Counts of the peers' public names, printed after the tests of this folder."""

COUNTS = {}


def pytest_runtest_logreport(report):
    if report.when == "call" and report.passed and "test_surface.py::test_structure" in report.nodeid:
        peer = report.nodeid.partition("[")[2].rstrip("]")
        COUNTS[peer] = [int(n) for n in dict(report.user_properties)["names"].split("/")]


def pytest_terminal_summary(terminalreporter):
    if COUNTS:
        terminalreporter.section("public names that are here")
        for peer, (offered, total) in sorted(COUNTS.items()):
            terminalreporter.write_line(f"{peer}: {offered} of {total}")
        sums = [sum(column) for column in zip(*COUNTS.values(), strict=True)]
        terminalreporter.write_line(f"all: {sums[0]} of {sums[1]}; the others have a row in the docs")
