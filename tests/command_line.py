"""The command line as a user calls it."""

import re

from typer.testing import CliRunner

from foveate.apps.cli import app


def run(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def words(result):
    return " ".join(re.sub("[│┃]", " ", result.output).split())


def succeeds(*arguments):
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    return words(result)


def fails(*arguments):
    result = run(*arguments)
    assert result.exit_code == 2, result.output
    return words(result)
