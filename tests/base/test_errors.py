"""The remedies that replace torch's messages."""

import re

import pytest
import torch

from adahessian.base.errors import CurvatureError, explain, first_line


@pytest.mark.parametrize(
    ("message", "remedy"),
    [
        ("derivative for '_flash_attention_backward' is not implemented", "SDPBackend.MATH"),
        ("derivative for 'aten::_cudnn_rnn_backward' is not implemented", r"_cudnn_rnn_backward cannot.*cudnn\.flags"),
        ("Trying to backward through a.b but no autograd formula was registered", r"^a\.b cannot"),
        ("torch.compile with aot_autograd does not currently support double backward", "compiled models"),
        ("compiled with non-empty donated buffers which requires create_graph=False", "compiled models"),
        ("Trying to backward through the graph a second time", "create_graph"),
        ("something else\nin detail", r"\(torch: something else\).*freeze"),
        ("", "freeze"),
    ],
)
def test_every_error_has_a_remedy(message, remedy):
    explained = explain(RuntimeError(message))
    assert type(explained) is CurvatureError
    assert re.search(remedy, str(explained))


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("memory"), CurvatureError("curvature")])
def test_other_errors_are_passed_on(error):
    with pytest.raises(type(error)) as caught:
        explain(error)
    assert caught.value is error


def test_first_line():
    assert first_line(ValueError("\na\nb")) == "a"
    assert first_line(KeyError()) == "KeyError"
