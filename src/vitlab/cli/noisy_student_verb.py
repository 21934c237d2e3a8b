"""`vitlab noisy-student`."""

from typing import Any

from vitlab.cli.options import PrintConfig, echo, print_json, show, show_planned, verb
from vitlab.core import config
from vitlab.options.training_options import NoisyStudentOptions


@verb(NoisyStudentOptions, print_config=PrintConfig)
def run(*, print_config: bool, as_json: bool, debug: bool, **given: Any) -> None:
    """Learn from unlabelled images: a teacher labels them, and a noisy student learns from both."""
    from vitlab.pipelines.noisy_student_run import noisy_student, noisy_student_config

    if print_config:
        table = noisy_student_config(**given)
        print_json(table) if as_json else echo(config.dump_toml(table), end="")
        return
    result = noisy_student(**given)
    if not show_planned(result, as_json=as_json):
        show(result.to_json(), result.sentences(), as_json=as_json)
