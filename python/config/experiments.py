"""The section `experiments`: models beside each other for parts of the users, and when a losing one is taken away."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from headrace.config.score import ModelChoice, version_as_text
from headrace.config.section import NAME, Section, parse_ds

#: Shares are kept to so many parts of all users.
PARTS = 10_000


class ExperimentArm(Section):
    """What the users of an arm get."""

    #: Whose scores their lists are: as `score.model`; null: those of `score.model` itself.
    model: ModelChoice | None = None
    #: Of the users who take part, above 0; of no arm: equal shares. Changing shares moves users, `percent` does not.
    share: float | None = Field(default=None, gt=0, le=1)

    _text = field_validator("model", mode="before")(version_as_text)


class StopRule(Section):
    """When the daily run takes an arm's model away from its users, who get the control's from then on."""

    #: By how much the arm must be worse at least, in the metric's unit: the better end of its sequential interval is
    #: on that side.
    worse_than: float = Field(default=0.0, ge=0)
    #: Days with ripe labels before it is asked.
    min_days: int = Field(default=1, ge=1)


class Experiment(Section):
    """Users to arms by a hash, the same every day; other experiments' arms have nothing to do with these.

    Of experiments whose arms have models, a user takes part in one: the first of the section that takes him.
    """

    #: Of the hash: another one deals the users anew; null: the experiment's name.
    salt: str | None = Field(default=None, min_length=1)
    #: By name; with a model or without (what the site does with the column `arms` is its own).
    arms: Mapping[str, ExperimentArm] = Field(min_length=2)
    #: The arm that the others are held against; null: the first.
    control: str | None = None
    #: Of all users, how many take part; raising it moves nobody to another arm.
    percent: float = Field(default=100.0, ge=0, le=100)
    #: The first day whose lists have arms; null: any.
    start: str | None = None
    #: The last one; null: there is none.
    end: str | None = None
    #: One of `outcomes.labels`; null: the first.
    label: str | None = None
    #: rate: the label over the rows that were shown, of clicks the click-through rate. per_user: the label's sum over
    #: the users.
    metric: Literal["rate", "per_user"] = "rate"
    #: Whether a lower metric is the better one.
    lower_is_better: bool = False
    #: Of the intervals; the sequential one of each of several arms is wider, so that it holds for all of them.
    confidence: float = Field(default=0.95, gt=0.5, lt=1)
    #: The effect that is expected, as a share of the metric before the start (without such days, of the control's
    #: first ripe one): where it is right, sequential bounds find it soonest.
    expected_effect: float = Field(default=0.1, gt=0)
    #: Days before the start whose outcomes take out what was known of each user (CUPED); 0: none.
    before_days: int = Field(default=7, ge=0)
    #: Users of an arm, and of the control, below which nothing is concluded.
    min_users: int = Field(default=100, ge=2)
    #: Null: arms are stopped by hand alone (`headrace experiment stop`).
    stop: StopRule | None = None

    @field_validator("start", "end", mode="before")
    @classmethod
    def _days(cls, value: Any) -> Any:
        # YAML reads 2026-01-01 as a date.
        return None if value is None else parse_ds(str(value))

    @field_validator("arms")
    @classmethod
    def _names(cls, value: Mapping[str, ExperimentArm]) -> Mapping[str, ExperimentArm]:
        for name in value:
            if not NAME.fullmatch(name):
                raise ValueError(f"'{name}' must match {NAME.pattern}")
        return value

    @model_validator(mode="after")
    def _fits(self) -> Experiment:
        given = [arm.share for arm in self.arms.values() if arm.share is not None]
        if given and len(given) < len(self.arms):
            raise ValueError("arms: give each arm a share, or none of them")
        if given and abs(sum(given) - 1) > 1e-6:
            raise ValueError(f"arms: the shares' sum is {sum(given):g}, not 1; how many users take part says `percent`")
        if min(self.shares.values()) < 1 / PARTS:
            raise ValueError(f"arms: shares are kept to {1 / PARTS:g}, and one is less")
        if self.control is not None and self.control not in self.arms:
            raise ValueError(f"control: '{self.control}' is none of arms ({', '.join(self.arms)})")
        if self.start is not None and self.end is not None and self.end < self.start:
            raise ValueError(f"end is {self.end}, before start, {self.start}")
        return self

    @property
    def shares(self) -> dict[str, float]:
        """Of the arms among those who take part; their sum is 1."""
        return {name: 1 / len(self.arms) if arm.share is None else arm.share for name, arm in self.arms.items()}

    @property
    def control_arm(self) -> str:
        """The arm that the others are held against."""
        return self.control or next(iter(self.arms))

    @property
    def treatments(self) -> tuple[str, ...]:
        """The other arms."""
        return tuple(name for name in self.arms if name != self.control_arm)

    @property
    def has_models(self) -> bool:
        """Whether an arm has a model of its own."""
        return any(arm.model is not None for arm in self.arms.values())

    def live(self, ds: str) -> bool:
        """Whether lists of a day have its arms."""
        return (self.start is None or self.start <= ds) and (self.end is None or ds <= self.end)
