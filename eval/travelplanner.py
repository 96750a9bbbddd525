"""Score TravelPlanner, sole-planning (Xie et al. 2024; code MIT, data CC-BY-4.0).

Paper: the column "TravelPlanner" (14.3 for Qwen2.5-7B, 16.6 for GenEnv 7B). A model sees a travel
request with all reference information and writes a day-by-day plan. The plan is checked against
eight commonsense constraints and, if it is complete and invents nothing, five hard ones. The
paper's number is the mean of four rates on the 180 validation queries: commonsense micro and macro,
hard micro and macro. The paper does not say which version of the within-city rule it ran. The old
one (default, the code behind the figures published up to 2025-11-07) tests the city of a day
without travel character by character; `--variant fixed` is the upstream one-line repair of that
date. Nor does the paper say whether its figure is for sole-planning or two-stage; sole-planning,
which needs no tools, is scored here.

Usage: python -m eval travelplanner --data DIR --model DIR [--variant fixed]
       python -m tests.verify travelplanner VERDICTS.jsonl --data DIR

A plan is a list of days; a day is an object with the keys days, current_city, transportation,
breakfast, attraction, lunch, dinner and accommodation, where "-" means nothing. `parse_plan` reads
a plan from a response.

Deviations:
* The official pipeline asks for free text and lets GPT-4 turn it into JSON; `prompt` asks for the
  JSON itself, in our own words, so that no second model is needed.
* The reference information in the prompt omits columns that no rule reads (coordinates, addresses,
  websites, ratings): 10,600 characters on average instead of 26,300.
* Only JSON is read: a plan written as a Python literal counts as not delivered.
* A plan fails if the official evaluator stops on it with an exception, which is then the reason.
* The official flight table has 4 million rows. The subset of flights that the reference information
  shows serves as well: an invented number is "not in the database" just the same.
"""
import ast
import csv
import functools
import io
import itertools
import json
import math
import re
from pathlib import Path

from errors import one_line
from eval.common import Verdict, read_rows, unzipped

NAME = "travelplanner"
PAPER = {"Qwen2.5-7B": 14.3, "GenEnv 7B": 16.6}
MAX_NEW_TOKENS = 2048  # the longest training plan is 3,600 characters of JSON
MAX_PLAN_CHARS = 20_000  # longer texts are not read as plans, to bound the cost of scoring
PARTS = {"test": "validation", "train": "train"}  # our split -> the official part
VARIANTS = {"fixed": ({"fixed": True}, {})}
NOTE = "sole-planning, mean of four rates, old within-city rule (--variant fixed: the repaired one)"

MEALS = ("breakfast", "lunch", "dinner")
CONTENT = ("transportation", "breakfast", "lunch", "dinner", "attraction", "accommodation")
UNUSED_DAY = "You don't need to fill in the information for this or later days."
COUNTS = ("days", "visiting_city_number", "people_number", "budget")
WISHES = ("house rule", "cuisine", "room type", "transportation")


# ------------------------------------------------------------------------------------- data

def _table(path: Path) -> list[dict]:
    """Return the rows of a CSV file."""
    csv.field_size_limit(10_000_000)  # the reference information of a query is one cell
    # newline="" keeps line breaks inside quoted cells.
    return list(csv.DictReader(io.StringIO(unzipped(path).decode("utf-8"), newline="")))


def _complete(path: Path) -> list[dict]:
    """Return the rows of a CSV file that have no missing value."""
    return [row for row in _table(path) if all(row.values())]


# {table: (file, its column of cities, its column of names)}
TABLES = {
    "restaurants": ("restaurants/clean_restaurant_2022.csv", "City", "Name"),
    "attractions": ("attractions/attractions.csv", "City", "Name"),
    "hotels": ("accommodations/clean_accommodations_2022.csv", "city", "NAME")}
NUMBERS = ("Average Cost", "price", "minimum nights", "maximum occupancy")


@functools.cache
def database(folder: str) -> dict:
    """Return an index of the tables in `folder`/database, loaded once.

    It is {"restaurants" | "attractions" | "hotels": {city: [(name, row)]}, "flights": {number:
    [(price, origin, destination)]}, "roads": {(origin, destination): km or None}, "states": {city:
    state}}. Rows keep the order of the files, because attributes come from the first row that
    matches.
    """
    root = Path(folder) / "database"
    with one_line(root, "is malformed"):
        tables = {name: _by_city(root / file, *columns)
                  for name, (file, *columns) in TABLES.items()}
        tables["flights"] = _flights(root / "flights")
        tables["roads"] = _roads(root / "googleDistanceMatrix/distance.csv")
        states = unzipped(root / "background/citySet_with_states.txt").decode("utf-8")
        tables["states"] = dict(line.split("\t") for line in states.split("\n") if line.strip())
        return tables


def _by_city(path, city, name) -> dict:
    """Return {city: [(name, row)]} of a file, with floats in the columns of NUMBERS."""
    table = {}
    for row in _complete(path):
        for column in NUMBERS:
            if column in row:
                row[column] = float(row[column])
        table.setdefault(row[city], []).append((row[name], row))
    return table


def _flights(folder) -> dict:
    """Return the full flight table, or else the subset that the reference information shows."""
    names = ("clean_Flights_2022.csv", "clean_Flights_2022.subset.csv")
    path = next((folder / n for n in names if (folder / n).is_file()), folder / names[0])
    table = {}
    for row in _complete(path):
        table.setdefault(row["Flight Number"], []).append(
            (float(row["Price"]), row["OriginCityName"], row["DestCityName"]))
    return table


def _roads(path) -> dict:
    """Return {(origin, destination): kilometres by road}, with None if there is no road or the
    drive takes a day or more."""
    table = {}
    for row in _table(path):
        km = None
        if row["distance"] and "day" not in row["duration"]:
            km = float(row["distance"].replace("km", "").replace(",", ""))
        # Pairs occur twice: the first row counts, even if it is empty.
        table.setdefault((row["origin"], row["destination"]), km)
    return table


def load(folder, split: str = "test", fixed: bool = False) -> list[dict]:
    """Return the queries of a split: "test" (180 validation queries, the evaluation) or "train"
    (45).

    A record is the official query (org, dest, days, people_number, local_constraint, budget,
    query, level, ...) with "id", "category" (the level), "data" (the folder in which the scorer
    finds the database), "reference" (reference information), "fixed" (whether the repaired
    within-city rule judges it) and, in the training part, "annotated_plan".
    """
    part = PARTS[split]
    queries = list(map(_query, _table(folder / f"{part}.csv")))
    references = read_rows(folder / f"{part}_ref_info.jsonl")
    # Match queries and references by position: the official files have no ids.
    return [{**query, "id": f"{part}-{row:03d}", "category": query["level"], "data": str(folder),
             "reference": reference, "fixed": fixed}
            for row, (query, reference) in enumerate(zip(queries, references, strict=True))]


def _query(cells) -> dict:
    """Return a query of the official CSV file, whose structured cells are Python literals."""
    query = {key: cells[key] for key in ("org", "dest", "query", "level")}
    query |= {key: int(cells[key]) for key in COUNTS}
    query["local_constraint"] = ast.literal_eval(cells["local_constraint"])
    # The annotation repeats the query before the list of days.
    if cells.get("annotated_plan"):
        query["annotated_plan"] = ast.literal_eval(cells["annotated_plan"])[1]
    return query


# ------------------------------------------------------------------------ prompt, base tasks

FORMAT = """Write the plan as a JSON list and nothing else: one object per day, in order, with the \
keys "days" (1, 2, ...), "current_city", "transportation", "breakfast", "attraction", "lunch", \
"dinner" and "accommodation". Except for "days" all values are strings; "-" stands for nothing.
- current_city: the city of a day without travel, or "from A to B" on a day of travel. Day 1 \
leaves the home city and the last day returns to it.
- transportation: "Flight Number: F1234567, from A to B, Departure Time: 08:10, Arrival Time: \
09:55", or "Self-driving, from A to B, duration: 2 hours, distance: 180 km, cost: 9", or "Taxi, \
from A to B, ..."; never mix self-driving with flights or taxis in one trip.
- breakfast, lunch, dinner, accommodation: "Name, City". Every day without travel needs all three \
meals, every night but the last day's needs an accommodation.
- attraction: "Name, City;Name, City;", each one closed by a semicolon. Every day without travel \
needs one.
Use only names from the information given, no restaurant or attraction twice. Stay at least the \
minimum nights of an accommodation and within the budget, and keep to every wish of the request. \
Where the destination is a state, write a city as "City(State)" or "City", and spend two days or \
more in each of the cities.
Example of one day: {"days": 2, "current_city": "Springfield", "transportation": "-", "breakfast": \
"Blue Door, Springfield", "attraction": "City Park, Springfield;Old Mill, Springfield;", "lunch": \
"Noodle Bar, Springfield", "dinner": "Corner Grill, Springfield", "accommodation": "Sunny Loft, \
Springfield"}"""

# {first word of a table's title in the reference information: the columns that some rule reads}
_COLUMNS = {"Attractions": ("Name",), "Restaurants": ("Name", "Average Cost", "Cuisines"),
            "Accommodations": ("NAME", "price", "room type", "house_rules", "minimum nights",
                               "maximum occupancy"),
            "Flight": ("Flight Number", "Price", "DepTime", "ArrTime")}


def reference_text(record, keep=None) -> str:
    """Return the reference information as small tables, cells separated by " | ".

    keep: a text, or None. With a text, tables are cut to four rows, but a row always stays if its
    name, followed by a comma, occurs in the text.
    """
    parts = []
    for title, entry in record["reference"].items():
        if isinstance(entry, str):
            parts.append(f"{title}: {entry}")
            continue
        columns = _COLUMNS[title.split(" ")[0]]
        if keep is not None:
            # Keep what the reference uses: a base task must stay solvable.
            first = [r for r in entry if f"{r[columns[0]]}," in keep]
            entry = first + [r for r in entry if r not in first][:max(0, 4 - len(first))]
        lines = [" | ".join(str(row[name]) for name in columns) for row in entry]
        parts.append("\n".join([f"{title}:", " | ".join(columns), *lines]))
    return "\n\n".join(parts)


def prompt(record) -> list[dict]:
    """Return chat messages: the reference information, then the request."""
    return [{"role": "system", "content": "You plan trips from given information only.\n" + FORMAT},
            {"role": "user", "content": f"Information:\n{reference_text(record)}\n\n"
                                        f"Request: {record['query']}"}]


def base_task(record) -> dict:
    """Return a training query as a base task {"task", "reference": the annotated plan}.

    Tables are cut to four rows, but rows that the annotated plan names always stay.
    """
    plan = [day for day in record["annotated_plan"] if day]
    answer = json.dumps(plan, ensure_ascii=False)
    # Spell names as in the tables, where quotes are not escaped.
    spoken = answer.replace('\\"', '"')
    return {"task": f"{record['query']}\n\n{FORMAT}\n\nInformation:\n"
                    f"{reference_text(record, spoken)}",
            "reference": answer}


# ------------------------------------------------------------------------------- the parser

def parse_plan(text: str):
    """Return the plan of a response, a list of days, or None if unreadable.

    The plan is the first JSON list of objects after the last </think>. Its keys may be in any case,
    with spaces or underscores.
    """
    text = text.rpartition("</think>")[2]
    if len(text) > MAX_PLAN_CHARS:
        return None
    decoder = json.JSONDecoder(strict=False)
    # Try only the first eight places that look like the start of a plan.
    for match in itertools.islice(re.finditer(r"\[\s*\{", text), 8):
        try:
            days, _ = decoder.raw_decode(text, match.start())
        except (ValueError, RecursionError):
            continue
        # Keep anything else between the days: it crashes the official evaluator.
        if any(day and isinstance(day, dict) for day in days):
            return [_with_field_names(day) if isinstance(day, dict) else day for day in days]
    return None


def _with_field_names(day: dict) -> dict:
    """Return a day with its keys as field names: "Current City" -> current_city."""
    return {key.strip().lower().replace(" ", "_"): value for key, value in day.items()}


# ---------------------------------------------------------------------------- text helpers
# These raise TypeError on anything but text, as the official regular expressions do. So a number or
# an object in a plan is a "crash".

def _text(value) -> str:
    if not isinstance(value, str):
        raise TypeError(f"expected text, got {type(value).__name__}")
    return value


def from_to(text: str):
    """Return (A, B) of the first "from A to B", else (None, None).

    The official pattern takes quadratic time, so only the first 300 characters are read.
    >>> from_to("Taxi, from New York to Reno(Nevada), cost: 4")
    ('New York', 'Reno(Nevada)')
    """
    match = re.search(r"from\s+(.+?)\s+to\s+([^,]+)(?=[,\s]|$)", _text(text)[:300])
    return match.groups() if match else (None, None)


def before_paren(text: str) -> str:
    """Return the text before the first "(" that is closed, else all of it; not stripped.

    >>> before_paren("Abilene(Texas)"), before_paren("Reno (Nevada")
    ('Abilene', 'Reno (Nevada')
    """
    head, paren, tail = _text(text).partition("(")
    return head if paren and ")" in tail and "\n" not in head else text


def name_city(text: str):
    """Return (name, city) of "Name, City", split at the last comma; ("-", "-") if that fails.

    >>> name_city("Bright, Modern Home, Abilene(Texas)")
    ('Bright, Modern Home', 'Abilene')
    """
    head, comma, tail = _text(text).rpartition(",")
    if not comma or not tail:
        return "-", "-"
    # A name never spans lines: it starts after the last line break.
    return head.rpartition("\n")[2].strip(), before_paren(tail.strip()).strip()


def hits(table: dict, text: str) -> list[dict]:
    """Return the rows of the text's city whose names contain the text's name; case matters."""
    name, city = name_city(text)
    return [row for title, row in table.get(city, ()) if name in title]


def _km(db, origin, destination):
    """Return the road distance in km, or None where there is no road."""
    return db["roads"].get((before_paren(origin), before_paren(destination)))


def _days(query, plan):
    """Yield (number, day), for no more days than the query asks for."""
    for index in range(min(query["days"], len(plan))):
        yield index + 1, plan[index]


def _filled(day, key) -> bool:
    """Return whether a day has something other than "-" under a key that may be missing."""
    return bool(key in day and day[key] and day[key] != "-")


def _meals(day):
    """Yield (meal, its text) for each meal that a day has."""
    for meal in MEALS:
        if _filled(day, meal):
            yield meal, day[meal]


def _attractions(day) -> list:
    """Return the attractions of a day; ignore the text after the last semicolon."""
    return day["attraction"].split(";")[:-1] if _filled(day, "attraction") else []


def _show(value) -> str:
    """Return a value for a message, short and printable."""
    return repr(value)[:90]


# ------------------------------------------------------------- eight commonsense constraints
# A rule takes (query, plan, db) and returns why it is broken, or ""; it raises what the official
# code raises on the same plan.

def _route(query, plan):
    """Return (cities in order, None), or (None, reason) if the trip starts in the wrong city."""
    # "from" anywhere makes a day of travel; "from Reno" without " to " is a crash.
    route = []
    for number, day in _days(query, plan):
        if "from" not in day["current_city"]:
            route.append(before_paren(day["current_city"]))
            continue
        origin, destination = map(before_paren, from_to(day["current_city"]))
        if number == 1 and origin != query["org"]:
            return None, f"day 1 leaves from {_show(origin)}, not from {query['org']}"
        route += [origin, destination]
    return route, None


def city_route(query, plan, db):
    """Apply rule 1: a closed tour of three or more stops, in known cities, each in one visit."""
    route, wrong_start = _route(query, plan)
    if wrong_start:
        return wrong_start
    # A first day without "from" is never compared with the home city.
    if route[0] != route[-1]:
        return f"the trip starts in {_show(route[0])} but ends in {_show(route[-1])}"
    if not _is_sequence(route):
        return "a city is visited twice, or for a single entry, or there are too few stops"
    for index, city in enumerate(route):
        if city not in db["states"]:
            return f"{_show(city)} is not a city of the database"
        # Short trips visit a city, longer ones a state.
        inside = 0 < index < len(route) - 1
        if inside and query["days"] > 3 and db["states"][city] != query["dest"]:
            return f"{_show(city)} does not lie in {query['dest']}"
    return ""


def _is_sequence(route) -> bool:
    """Return whether no city recurs after others (except at the end), and no inner run of one city
    has length 1."""
    if len(route) < 3:
        return False
    last, visited, start = len(route) - 1, set(), 0
    for city, run in itertools.groupby(route):
        length = sum(1 for _ in run)
        if city in visited and start not in (0, last):
            return False
        if length == 1 and 0 < start < last:
            return False
        visited.add(city)
        start += length
    return True


def diverse_restaurants(query, plan, db):
    """Apply rule 2: no restaurant text occurs twice."""
    seen = []  # a list: values need not be hashable
    for number, day in _days(query, plan):
        for meal, text in _meals(day):
            if text in seen:
                return f"day {number}: the {meal} at {_show(text)} is a repetition"
            seen.append(text)
    return ""


def diverse_attractions(query, plan, db):
    """Apply rule 3: no attraction occurs twice; text after the last semicolon is ignored."""
    seen = set()
    for number, day in _days(query, plan):
        for piece in _attractions(day):
            if piece in seen:
                return f"day {number}: the attraction {_show(piece)} is a repetition"
            seen.add(piece)
    return ""


def minimum_nights(query, plan, db):
    """Apply rule 4: every stay lasts the minimum nights, if the name fits exactly one hotel."""
    stays = []
    for number, day in _days(query, plan):
        if "accommodation" not in day:
            return f"day {number} has no accommodation entry"
        stays.append(day["accommodation"])
    # Unknown and ambiguous names pass here.
    for hotel, run in itertools.groupby(stays):
        if hotel not in ("-", ""):
            nights, rows = sum(1 for _ in run), hits(db["hotels"], hotel)
            if len(rows) == 1 and nights < rows[0]["minimum nights"]:
                return f"{_show(hotel)} is for {rows[0]['minimum nights']:g} nights or more"
    return ""


def _mode(text):
    """Return the first of taxi, self-driving and flight, in this order, that a text mentions."""
    text = text.lower()
    return next((mode for mode in ("taxi", "self-driving", "flight") if mode in text), None)


def consistent_transportation(query, plan, db):
    """Apply rule 5: day 1 has transportation, and self-driving excludes flights and taxis."""
    # Day 1 must have the key: its absence is a crash.
    first = plan[0]["transportation"]
    if not first or first == "-":
        return "day 1 has no transportation"
    modes = {_mode(first)}
    for _, day in _days(query, plan):
        if _filled(day, "transportation"):
            modes.add(_mode(day["transportation"]))
    if "self-driving" in modes and modes & {"flight", "taxi"}:
        return "self-driving is mixed with a flight or a taxi"
    return ""


def _stops(city_text, fixed):
    """Return the cities of a day, in order.

    Until the fix of 2025-11-07, the official code looped over the city of a day without travel as
    if it were a list. Its single CHARACTERS were the stops, so under the old rule the text itself
    is returned.
    """
    if "from" in city_text:
        return [before_paren(city) for city in from_to(city_text)]
    city = before_paren(city_text)
    return [city] if fixed else city


def _is_there(place, stops) -> bool:
    """Return whether a place mentions one of the stops."""
    return any(stop in place for stop in stops)


def within_city(query, plan, db):
    """Apply rule 6: meals, attractions and hotel lie in the day's city; transportation names it."""
    for number, day in _days(query, plan):
        stops = _stops(day["current_city"], query["fixed"])
        if _filled(day, "transportation"):
            if not all(stop in day["transportation"] for stop in stops):
                return f"day {number}: the transportation does not fit the current city"
        for meal, text in _meals(day):
            if not _is_there(text, stops):
                return f"day {number}: the {meal} is not in the current city"
        if not all(_is_there(piece, stops) for piece in _attractions(day)):
            return f"day {number}: an attraction is not in the current city"
        # The night is spent where the day ends. An empty city has no last character: a crash.
        if _filled(day, "accommodation") and stops[-1] not in day["accommodation"]:
            return f"day {number}: the accommodation is not in the current city"
    return ""


def within_sandbox(query, plan, db):
    """Apply rule 7: flights, roads, restaurants, attractions and hotels are in the database."""
    for number, day in _days(query, plan):
        trip = day["transportation"]  # a missing key is an exception here, unlike below
        if trip and trip != "-" and not _trip_exists(day, trip, db):
            return f"day {number}: {_show(trip)} is not in the database"
        for table, what, text in _places(day):
            if not hits(db[table], text):
                return f"day {number}: the {what} {_show(text)} is not in the database"
    return ""


def _places(day):
    """Yield (table, what it is, text) of all meals, attractions and hotels of a day."""
    for meal, text in _meals(day):
        yield "restaurants", meal, text
    for piece in _attractions(day):
        yield "attractions", "attraction", piece
    if _filled(day, "accommodation"):
        yield "hotels", "accommodation", day["accommodation"]


def _leg(day, trip):
    """Return (A, B) of a transportation text, else of the day's current city."""
    origin, destination = from_to(trip)
    return (origin, destination) if origin is not None else from_to(day["current_city"])


def _flight_number(trip) -> str:
    """Return the number after the exact label. Without it, raise IndexError as the official code
    does."""
    return trip.split("Flight Number: ")[1].split(",")[0]


def _trip_exists(day, trip, db) -> bool:
    """Return whether a flight or road is in the database; other texts pass."""
    origin, destination = _leg(day, trip)
    if "flight number" in trip.lower():
        if origin is None:
            raise ValueError("a flight without from and to")
        origin, destination = before_paren(origin), before_paren(destination)
        # Date, times and price are not compared.
        return any((start, end) == (origin, destination)
                   for _, start, end in db["flights"].get(_flight_number(trip), ()))
    if _mode(trip) in ("taxi", "self-driving"):
        return origin is not None and _km(db, origin, destination) is not None
    return True


def complete(query, plan, db):
    """Apply rule 8: all needed days, cities and entries are there, at least half of them filled."""
    # Days beyond the end of the trip may be empty objects or carry a stock phrase.
    used = sum(day != {} and day["current_city"] != UNUSED_DAY for _, day in _days(query, plan))
    if used != query["days"]:
        return f"{used} days are planned, {query['days']} are asked for"
    route, wrong_start = _route(query, plan)
    if wrong_start:
        return wrong_start
    # Home does not count as a city visited.
    cities = set(route) - {query["org"]}
    if len(cities) != query["visiting_city_number"]:
        return f"{len(cities)} cities are visited, not {query['visiting_city_number']}"
    values = 0
    for number, day in _days(query, plan):
        gap = _gap(query, number, day)
        if gap:
            return f"day {number} has no {gap}"
        values += sum(1 for key in day if day[key] and day[key] != "-")
    # The denominator has six entries a day, though "days" and "current_city" count above.
    if values / (6 * query["days"]) < 0.5:
        return "more than half of the plan is empty"
    return ""


def _gap(query, number, day) -> str | None:
    """Return what a day lacks, or None."""
    for key in CONTENT:
        if key not in day:
            return f"{key} entry"
    city, empty = day["current_city"], ["", "-"]
    if ("from " in city or "to " in city) and day["transportation"] in empty:
        return "transportation although it is a day of travel"
    # Here " to " begins with a space: "Sacramento (California)" is travel above but a stay here.
    if "from " not in city and " to " not in city and day["attraction"] in empty:
        return "attraction although it is a day without travel"
    # The last night is spent at home.
    if number != query["days"] and day["accommodation"] in empty:
        return "accommodation"
    if "from " not in city:
        return next((meal for meal in MEALS if day[meal] in empty), None)
    return None


# The official names and their order: the first rule that raises is the crash that is recorded.
COMMONSENSE = {"is_reasonable_visiting_city": city_route,
               "is_valid_restaurants": diverse_restaurants,
               "is_valid_attractions": diverse_attractions,
               "is_valid_accommodation": minimum_nights,
               "is_valid_transportation": consistent_transportation,
               "is_valid_information_in_current_city": within_city,
               "is_valid_information_in_sandbox": within_sandbox,
               "is_not_absent": complete}


# ------------------------------------------------------------------- five hard constraints

def _stays(query, plan, db):
    """Yield, for each day that names a known hotel, the first row that matches."""
    for _, day in _days(query, plan):
        if _filled(day, "accommodation"):
            yield from hits(db["hotels"], day["accommodation"])[:1]


def total_cost(query, plan, db) -> float:
    """Return the cost in dollars for all travellers: trips, meals, and as many rooms as they need.

    Hard rule 1 compares it with the budget.
    """
    people, cost = query["people_number"], 0
    for _, day in _days(query, plan):
        if _filled(day, "transportation"):
            cost += _trip_cost(day, day["transportation"], people, db)
        for _, text in _meals(day):
            for restaurant in hits(db["restaurants"], text)[:1]:
                cost += restaurant["Average Cost"] * people
    # A hotel is paid for on every day that names it.
    for hotel in _stays(query, plan, db):
        cost += hotel["price"] * math.ceil(people / hotel["maximum occupancy"])
    return float(cost)


def _trip_cost(day, trip, people, db) -> float:
    """Return a trip's price: the fare of a flight per head, 5 cents per km for each car of five, or
    $1 per km for each taxi of four."""
    origin, destination = _leg(day, trip)
    # A trip from nowhere to nowhere is free.
    if origin is None:
        return 0
    if "flight number" in trip.lower():
        fares = db["flights"].get(_flight_number(trip))  # by number only
        return fares[0][0] * people if fares else 0
    # Unlike `_mode`, the price looks for self-driving before taxi.
    if "self-driving" in trip.lower():
        return int(_km(db, origin, destination) * 0.05) * math.ceil(people / 5)
    if "taxi" in trip.lower():
        return int(_km(db, origin, destination)) * math.ceil(people / 4)
    return 0


def room_rule(query, plan, db):
    """Apply hard rule 2: no hotel forbids what the travellers need."""
    need = query["local_constraint"]["house rule"]
    if need is None:
        return None
    for hotel in _stays(query, plan, db):
        if f"No {need}" in hotel["house_rules"]:
            return f"{_show(hotel['NAME'])} does not allow {need}"
    return ""


def room_type(query, plan, db):
    """Apply hard rule 3: every hotel is of the wanted type."""
    want = query["local_constraint"]["room type"]
    if want is None:
        return None
    types = {"shared room": "Shared room", "private room": "Private room",
             "entire room": "Entire home/apt"}
    for hotel in _stays(query, plan, db):
        shared = want == "not shared room" and hotel["room type"] == "Shared room"
        if shared or want in types and hotel["room type"] != types[want]:
            return f"{_show(hotel['NAME'])} is a {hotel['room type']}, not a(n) {want}"
    return ""


def cuisine(query, plan, db):
    """Apply hard rule 4: every wanted cuisine is eaten away from home."""
    wanted = query["local_constraint"]["cuisine"]
    if not wanted:
        return None
    eaten = set()
    for _, day in _days(query, plan):
        for _, text in _meals(day):
            if name_city(text)[1] == query["org"]:
                break  # a meal at home ends the day: later meals elsewhere do not count
            for restaurant in hits(db["restaurants"], text)[:1]:
                eaten |= {kind for kind in wanted if kind in restaurant["Cuisines"]}
    missing = [kind for kind in wanted if kind not in eaten]
    return f"no restaurant: {', '.join(missing)}" if missing else ""


def transportation(query, plan, db):
    """Apply hard rule 5: no trip names the unwanted means of travel in the official spelling."""
    limit = query["local_constraint"]["transportation"]
    if limit is None:
        return None
    # The match is case-sensitive: "self-driving" slips through.
    unwanted = {"no flight": "Flight", "no self-driving": "Self-driving"}.get(limit)
    for number, day in _days(query, plan):
        if unwanted and _filled(day, "transportation") and unwanted in day["transportation"]:
            return f"day {number} travels by {unwanted} in spite of {limit!r}"
    return ""


HARD = {"valid_cuisine": cuisine, "valid_room_rule": room_rule,
        "valid_transportation": transportation, "valid_room_type": room_type}


# ------------------------------------------------------------------------ verdict and rates

def judge(query, plan, db) -> dict:
    """Return the official verdict on a plan of any shape; never raise.

    It is {"delivered", "crash" (text or None), "commonsense" and "hard" ({name: why it is broken,
    "", or None where nothing is asked}; None where a stage was not reached), "commonsense_pass",
    "hard_pass", "final_pass", "total_cost" (or None)}.
    """
    crash = soft = hard = cost = None
    # null, "", [] and {} are not plans; any other shape counts as delivered and may crash below.
    if plan:
        try:
            soft = {name: rule(query, plan, db) for name, rule in COMMONSENSE.items()}
            # Hard constraints are checked only for complete plans without inventions.
            if not (soft["is_not_absent"] or soft["is_valid_information_in_sandbox"]):
                hard = {name: rule(query, plan, db) for name, rule in HARD.items()}
                cost = total_cost(query, plan, db)
                over = f"the trip costs {cost:g}, the budget is {query['budget']:g}"
                hard["valid_cost"] = over if cost > query["budget"] else ""
        except (TypeError, LookupError, AttributeError, ValueError, RecursionError) as error:
            # The official run stops here without any score.
            stage = "commonsense" if soft is None else "hard"
            crash = f"{stage}: {type(error).__name__}: {str(error)[:200]}"
            soft = hard = cost = None
    soft_pass = soft is not None and not any(soft.values())
    hard_pass = hard is not None and not any(hard.values())
    return {"delivered": bool(plan), "crash": crash, "commonsense": soft, "hard": hard,
            "commonsense_pass": soft_pass, "hard_pass": hard_pass,
            "final_pass": soft_pass and hard_pass, "total_cost": cost}


def score(record, response: str) -> Verdict:
    """Return the verdict on one response. ok: the plan passes everything (the official final pass).

    extra: what the official rates are made of, see `overall`. score: the mean of this plan's four
    parts. The official rates pool the parts over plans, which may give a slightly different number.
    """
    result = judge(record, parse_plan(response), database(record["data"]))
    hard_checks = 1 + sum(record["local_constraint"][wish] is not None for wish in WISHES)
    soft_passed, soft_checks = _passed(result["commonsense"]), len(COMMONSENSE)
    extra = {"delivered": result["delivered"], "commonsense_micro": soft_passed / soft_checks,
             "commonsense_macro": result["commonsense_pass"],
             "hard_passed": _passed(result["hard"]), "hard_checks": hard_checks,
             "hard_macro": result["hard_pass"]}
    verdict = Verdict(result["final_pass"], 0.0, _reason(result), extra)
    verdict.score = overall([verdict]) / 100
    return verdict


def _passed(checks) -> int:
    """Return how many checks of a stage are met (0 if it was not reached)."""
    return list((checks or {}).values()).count("")


def _reason(verdict) -> str:
    """Return one line on what failed, earliest stage first."""
    if not verdict["delivered"]:
        return "no list of days can be read from the response"
    if verdict["crash"]:
        return f"counted as failed: the official evaluator stops with {verdict['crash']}"
    checks = {**verdict["commonsense"], **(verdict["hard"] or {})}
    broken = "; ".join(filter(None, checks.values()))
    return broken or f"passes every check, cost {verdict['total_cost']:g}"


def overall(verdicts) -> float:
    """Return the paper's number in percent: the mean of two micro and two macro rates.

    A micro rate pools the checks of all plans; plans that were not delivered fail everywhere.
    """
    def total(name):
        return sum(v.extra[name] for v in verdicts)
    plans = max(1, len(verdicts))
    shares = [
        total(name) / plans for name in ("commonsense_micro", "commonsense_macro", "hard_macro")
    ]
    return 25.0 * (sum(shares) + total("hard_passed") / max(1, total("hard_checks")))
