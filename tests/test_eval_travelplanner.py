"""TravelPlanner: the plan parser, and cases that no recorded verdict covers, on a small database.

Usage: python -m pytest -q tests/test_eval_travelplanner.py

Recorded official verdicts and hostile texts are in test_eval_harness.py.
"""
import copy
import json
import tempfile
from pathlib import Path

import pytest

from eval import travelplanner as tp
from test_eval_harness import TRAVEL as QUERY, tiny_travelplanner


def tables():
    """Return the tables of test_eval_harness.py; one of their three hotels has no room type."""
    with tempfile.TemporaryDirectory() as folder:
        tiny_travelplanner(Path(folder))
        return tp.database(folder)


DB = tables()
PLAN = [{"days": 1, "current_city": "from Home to Reno",
         "transportation": "Flight Number: F1, from Home to Reno, Departure Time: 05:00",
         "breakfast": "-", "attraction": "-", "lunch": "-", "dinner": "Blue Door, Reno",
         "accommodation": "Loft, Reno"},
        {"days": 2, "current_city": "Reno", "transportation": "-", "breakfast": "Red Door, Reno",
         "attraction": "Museum, Reno;Zoo (old), Reno;", "lunch": "Inn, Reno",
         "dinner": "Diner, Reno(Nevada)", "accommodation": "Loft, Reno"},
        {"days": 3, "current_city": "from Reno to Home",
         "transportation": "Flight Number: F2, from Reno to Home", "breakfast": "Grill, Reno",
         "attraction": "-", "lunch": "-", "dinner": "-", "accommodation": "-"}]


def judge(plan=PLAN, fixed=False, **changes):
    """Return the verdict on a plan for QUERY with some fields of the query changed."""
    return tp.judge({**QUERY, "fixed": fixed, **changes}, plan, DB)


def changed(**fields):
    """Return PLAN with some fields changed: breakfast_2="..." is the breakfast of day 2."""
    plan = copy.deepcopy(PLAN)
    for name, value in fields.items():
        key, number = name.rsplit("_", 1)
        plan[int(number) - 1][key] = value
    return plan


def failed(verdict) -> set:
    """Return the names of the checks that failed."""
    assert verdict["crash"] is None
    checks = {**verdict["commonsense"], **(verdict["hard"] or {})}
    return {name for name, reason in checks.items() if reason}


def wishes(**values):
    """Return a local constraint with some wishes."""
    return {"local_constraint": {**QUERY["local_constraint"], **values}}


def test_a_good_plan_passes_and_costs_what_it_should():
    """Otherwise every other test here would change a plan that fails anyway."""
    verdict = judge()
    assert verdict["final_pass"] and failed(verdict) == set()
    # for three people: flights 70 + 30, meals 10 + 20 + 5 + 8 + 9, two rooms for two nights
    assert verdict["total_cost"] == 3 * (100 + 52) + 2 * 2 * 100


# -------------------------------------------------------------- eight commonsense constraints

ROUTE, CITY = "is_reasonable_visiting_city", "is_valid_information_in_current_city"
ABSENT, NIGHTS = "is_not_absent", "is_valid_accommodation"


@pytest.mark.parametrize("names, fields", [
    # among the stops Reno, Elko, Elko, Reno appears only once
    ({ROUTE, CITY, ABSENT}, {"current_city_2": "Elko", "current_city_3": "from Elko to Home"}),
    # a stay in Reno throughout: without "from" the home city is not compared, but meals are due
    ({ABSENT}, {"current_city_1": "Reno", "current_city_3": "Reno"}),
    (set(), {"dinner_2": "Red Door, Reno "}),  # no repetition, because the raw texts differ
    ({NIGHTS}, {"accommodation_1": "Long Stay, Reno", "accommodation_2": "Long Stay, Reno"}),
    # a name that fits two hotels passes, although one night is too short for both
    (set(), {"accommodation_1": "o, Reno", "accommodation_2": "Lo, Reno"}),
    (set(), {"breakfast_3": "Inn, Home"})])  # an inn of the same name in another city
def test_commonsense_rules(names, fields):
    """Otherwise plans that the official evaluator fails would pass, or the reverse."""
    assert failed(judge(changed(**fields))) == names


def test_both_versions_of_the_within_city_rule():
    """Otherwise the figure of one version would appear under the other's name."""
    # every letter of "Reno" occurs, so only the repaired rule notices the other city
    plan = changed(lunch_2="Mum, Home", accommodation_2="Loft, Otto", transportation_2="R, n, o, e")
    old, fixed = judge(plan)["commonsense"], judge(plan, fixed=True)["commonsense"]
    assert not old[CITY] and fixed[CITY]
    # an empty city has no last letter, at which only the old rule looks
    empty = changed(current_city_2="", breakfast_2="-", lunch_2="-", dinner_2="-", attraction_2="-")
    assert judge(empty)["crash"].startswith("commonsense: IndexError")
    assert judge(empty, fixed=True)["crash"] is None


def test_completeness_counts_all_keys_but_divides_by_six():
    """Otherwise plans that the official evaluator finds half empty would pass as complete."""
    base = {"current_city": "from Home to Home", "transportation": "Bus", "breakfast": "-",
            "lunch": "-", "dinner": "-", "attraction": "-", "accommodation": "x"}
    query = {**QUERY, "days": 1, "visiting_city_number": 0}
    assert not tp.complete(query, [base], DB)  # 3 of 6
    assert tp.complete(query, [{**base, "accommodation": "-"}], DB)
    assert not tp.complete(query, [{**base, "accommodation": "-", "note": "x"}], DB)
    # the letters "to " in "Sacramento (California)" make a day of stay ask for transportation
    assert "travel" in tp._gap(QUERY, 2, {**PLAN[1], "current_city": "Sacramento (California)"})


@pytest.mark.parametrize("plan, crash", [
    ({"a": 1}, "KeyError"), ([[]], "TypeError"), (changed(dinner_2=7), "TypeError"),
    (changed(transportation_1="flight number: F1, from Home to Reno"), "IndexError"),
    (changed(transportation_2="Flight Number: Reno"), "ValueError")])
def test_crashes_of_the_official_evaluator_are_failures(plan, crash):
    """Otherwise one odd plan would end the evaluation, or pass."""
    verdict = judge(plan)
    assert verdict["crash"].startswith(f"commonsense: {crash}")
    assert verdict["delivered"] and not verdict["final_pass"] and verdict["commonsense"] is None


# ------------------------------------------------------------------- five hard constraints


@pytest.mark.parametrize("limits, names", [
    ({"budget": 855}, {"valid_cost"}), ({"budget": 856}, set()),
    (wishes(**{"room type": "not shared room"}), {"valid_room_type"}),
    (wishes(cuisine=["Indian", "Mexican"]), {"valid_cuisine"}),
    (wishes(transportation="no flight"), {"valid_transportation"})])
def test_hard_rules(limits, names):
    """Otherwise a plan over the budget, or against a wish, would pass."""
    verdict = judge(**limits)
    assert failed(verdict) == names and verdict["commonsense_pass"]
    assert verdict["final_pass"] != bool(names)


def test_road_costs_round_down_and_count_cars():
    """Otherwise totals would differ from the official ones."""
    day = {"current_city": "from Home to Reno"}
    assert tp._trip_cost(day, "Self-driving", 3, DB) == 9  # int(193 * 0.05), from current_city
    assert tp._trip_cost(day, "Self-driving, from Reno to Home", 6, DB) == 20  # two cars
    assert tp._trip_cost(day, "Taxi", 5, DB) == 386


# --------------------------------------------------------------------------------- parser

DUMP = json.dumps(PLAN)


@pytest.mark.parametrize("text", [
    DUMP.replace("current_city", "Current City"), f"Sure: {DUMP} bye",
    f'<think>[{{"a": 1}}] hm</think> My plan is\n```json\n{DUMP}\n```\n[done]'])
def test_plans_are_read_from_many_forms(text):
    """Otherwise a model's plan would be lost because of how it is wrapped."""
    assert tp.parse_plan(text) == PLAN


@pytest.mark.parametrize("text", ["No.", "[{}]", "[1, 2]", '"[]"', DUMP[:-5], "[{'a': open('x')}]"])
def test_other_texts_hold_no_plan(text):
    """Otherwise texts without a plan would count as delivered plans."""
    assert tp.parse_plan(text) is None


# ------------------------------------------------------------------- a data folder on disk

def test_base_task_and_score_on_disk(tmp_path):
    """Otherwise a base task would lack what its reference plan names, or the score would not be the
    mean of four rates."""
    tiny_travelplanner(tmp_path, annotated_plan=[{}, PLAN + [{}]])
    (train,), (test,) = tp.load(tmp_path, "train"), tp.load(tmp_path)
    task = tp.base_task(train)
    assert json.loads(task["reference"]) == PLAN
    # shortened tables keep what the reference plan names
    assert "\nMuseum\nZoo (old)\nA\nB\n" in task["task"] + "\n"
    right = tp.score({**test, **wishes(cuisine=["Indian"])}, DUMP)
    # this plan breaks one rule of eight
    repeated = tp.score(test, json.dumps(changed(dinner_2="Red Door, Reno")))
    assert right.ok and right.score == 1 and repeated.score == (7 / 8 + 0 + 1 + 1) / 4
    # shares: commonsense micro and macro, hard macro; hard micro pools 2 + 1 of 2 + 1 + 1 checks
    shares = (15 / 8 + 1 + 2) / 3
    rate = tp.overall([right, repeated, tp.score(test, "no plan")])
    assert rate == pytest.approx(25 * (shares + 3 / 4))
