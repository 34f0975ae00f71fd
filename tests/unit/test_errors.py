from __future__ import annotations

import copy
import inspect
import pickle

import pytest

from basp import errors
from basp.errors import BaspError

KINDS = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, BaspError)]

AS_BUILTIN = {
    "BaspError": Exception,
    "PlanError": ValueError,
    "BatchError": ValueError,
    "DisagreementError": RuntimeError,
    "ModelError": ValueError,
    "ConfigError": ValueError,
    "DataError": ValueError,
    "TrainingError": RuntimeError,
    "LabError": RuntimeError,
}


def make(kind: type[BaspError]) -> BaspError:
    return kind("sequence 3 has 0 tokens", allowed="at least 1 token", remedy="drop empty documents")


@pytest.mark.parametrize("kind", KINDS)
def test_says_what_arrived_what_is_allowed_and_what_to_do(kind: type[BaspError]) -> None:
    error = make(kind)
    assert str(error) == "sequence 3 has 0 tokens. Allowed: at least 1 token. To do: drop empty documents."
    assert (error.arrived, error.allowed, error.remedy) == (
        "sequence 3 has 0 tokens",
        "at least 1 token",
        "drop empty documents",
    )


@pytest.mark.parametrize("kind", KINDS)
def test_allowed_and_remedy_cannot_be_left_out(kind: type[BaspError]) -> None:
    with pytest.raises(TypeError):
        kind("sequence 3 has 0 tokens")  # type: ignore[call-arg]
    with pytest.raises(TypeError):
        kind("sequence 3 has 0 tokens", "at least 1 token", "drop empty documents")  # type: ignore[misc]


@pytest.mark.parametrize("kind", KINDS)
def test_survives_pickling_between_processes(kind: type[BaspError]) -> None:
    error = make(kind)
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        back = pickle.loads(pickle.dumps(error, protocol))
        assert type(back) is kind
        assert str(back) == str(error)
        assert (back.arrived, back.allowed, back.remedy) == (error.arrived, error.allowed, error.remedy)
    assert str(copy.deepcopy(error)) == str(error)


def test_a_subclass_of_a_users_own_survives_pickling() -> None:
    back = pickle.loads(pickle.dumps(make(_UsersError)))
    assert type(back) is _UsersError
    assert str(back) == str(make(_UsersError))


class _UsersError(errors.PlanError):
    pass


@pytest.mark.parametrize("kind", KINDS)
def test_is_caught_as_basp_error_and_as_the_builtin_that_it_is(kind: type[BaspError]) -> None:
    assert issubclass(kind, AS_BUILTIN[kind.__name__])
    with pytest.raises(BaspError):
        raise make(kind)


def test_every_error_of_the_module_is_in_the_tree() -> None:
    defined = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if kind.__module__ == errors.__name__]
    assert sorted(kind.__name__ for kind in defined) == sorted(AS_BUILTIN)
    assert defined == KINDS
    assert all(kind.__doc__ for kind in KINDS)
