"""The tasks of a table: networks to train, then attacks on them, and what each will cost."""

import difflib
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dcnet.tables.ledger import COMPUTED, Entry, Ledger, cell_of
from dcnet.tables.table import SMOKE_IMAGES, Cell, Setup, Table
from dcnet.training import Recipe, Run, read_about, recorded


@dataclass(frozen=True)
class Task:
    """A network to train in a run folder; or, with a set-up, attacks on the network in the folder."""

    title: str
    recipe: Recipe
    folder: Path
    paper: Any = field(default=None, compare=False)
    measure: str = field(default="error", compare=False)  # which number of it the table shows
    setup: Setup | None = None
    source: Path | None = None  # the run folder of the network that adversarial images are made on
    images: int | None = None  # how many to attack; None for all
    kept: dict[Path, Path] = field(default_factory=dict, compare=False)  # files of weights to restore folders from

    @property
    def ended(self) -> Run | None:
        """The run, if the task is done: the run is finished, has diverged, or has been attacked; else None."""
        if self.setup is not None:
            return Run(self.folder) if self.ready and self.found is not None else None
        ends = [name for name in ("result.json", "diverged.json") if (self.folder / name).is_file()]
        return Run(self.folder) if ends and self.other is None else None

    @property
    def other(self) -> Recipe | None:
        """The recipe of the run in the folder, if that is of another cell; else None."""
        there = Run(self.folder).recipe if (self.folder / "recipe.json").is_file() else self.recipe
        return None if cell_of(there) == cell_of(self.recipe) else there

    @property
    def found(self) -> dict[str, Any] | None:
        """The record of the set-up's attacks, or None. `dcnet attack --replace` may have taken some of them out."""
        if self.setup is None or not (self.folder / "attacks.json").is_file():
            return None
        of_setup = [record for record in Run(self.folder).attacks if record.get("setup") == self.setup.name]
        wanted = {attack.partition(":")[0] for attack in self.setup.attacks.split(",")}
        whole = [
            record
            for record in of_setup
            if wanted <= {entry["attack"].partition(":")[0] for entry in record["attacks"]}
        ]
        return whole[-1] if whole else None

    @property
    def ready(self) -> bool:
        """Whether it can start: attacks need trained networks."""
        needed = (
            [folder for folder in (self.folder, self.source) if folder is not None] if self.setup is not None else []
        )
        return all((folder / "result.json").is_file() for folder in needed)


@dataclass
class Plan:
    """The state of a table under one schedule: entries of the cells that are done, and tasks for the others.

    unused: files of kept weights that are not those of the network that counts. matched: the matches that found a cell.
    """

    table: Table
    done: list[tuple[Cell, Entry]] = field(default_factory=list)
    missing: list[Task] = field(default_factory=list)
    unused: list[Path] = field(default_factory=list)
    matched: set[str] = field(default_factory=set)


def plan(
    table: Table,
    ledger: Ledger,
    runs: Path,
    schedule: str,
    seeds: list[int],
    matches: list[str] | None = None,
    weights: Path | None = None,
    /,  # recipes have a field `schedule` too
    **settings: Any,
) -> Plan:
    """Return which cells are done and which have to be trained or attacked, seed by seed.

    matches: only cells with one of these in their name, in the order of the matches, and none with a match behind an
    exclamation mark; `check_matches` raises if one of them finds nothing. weights: a folder of weights that were kept:
    these networks need no training before attacks, if they are those of the training that counts. settings: recipe
    fields of all cells. Attacks on a network that has not converged are done: its entry stands for them. Attacks with
    images made on such a network are left out.
    """
    found = Plan(table)
    folders: dict[tuple[Any, ...], Path] = {}
    kept: dict[Path, Path] = {}
    named = [f"{name}={settings[name]}" for name in sorted(settings) if name not in (*COMPUTED, "data", "precision")]

    def title_of(recipe: Recipe, name: str) -> str:
        how = ", ".join((recipe.data, f"{schedule} schedule", recipe.precision, *named, f"seed {recipe.seed}"))
        return f"{table.networks or table.name}: {name}, {how}"

    def names_of(cell: Cell, seed: int) -> str:
        """Return the name that a cell has in its table, and the one that --list shows."""
        try:
            recipe = table.recipe(cell, schedule, seed, **settings)
        except ValueError:  # it cannot be trained with these settings, which is said if it is to be
            return cell.title
        return f"{cell.title}\n{title_of(recipe, cell.network or cell.title)}"

    def network(recipe: Recipe, name: str, paper: Any, needs_weights: bool) -> Path:
        """Return the run folder of a network; add a task to train it if it is missing."""
        known = cell_of(recipe)
        if known not in folders:
            title = title_of(recipe, name)
            folders[known] = runs / _slug(title)
            trained = _in_folder(folders[known], recipe, ledger)
            file = None if weights is None else weights / f"{folders[known].name}.safetensors"
            if not trained and file is not None and file.is_file():
                trained = _of_what_counts(file, recipe, ledger)
                if trained:
                    kept[folders[known]] = file
                else:
                    found.unused.append(file)
            entry = ledger.find(recipe)
            if entry is None or (needs_weights and not trained and not entry.diverged):
                found.missing.append(Task(title, recipe, folders[known], paper, table.measure))
        return folders[known]

    for seed in seeds:
        for cell in _matching({cell: names_of(cell, seed) for cell in table.cells}, matches or [], found.matched):
            recipe = table.recipe(cell, schedule, seed, **settings)
            setup = cell.attack[0] if cell.attack is not None else None
            network_entry = ledger.find(recipe)
            entry = network_entry if setup is None else ledger.find(recipe, setup.name)
            if network_entry is not None and network_entry.diverged:
                entry = network_entry
            if entry is not None:
                found.done.append((cell, entry))
                continue
            images = SMOKE_IMAGES if schedule == "smoke" else None
            made_on = None if setup is None else table.source(setup, recipe)
            of_source = None if made_on is None else ledger.find(made_on)
            if of_source is not None and of_source.diverged and images is None:
                continue  # images made on a network at chance would say nothing; a rehearsal takes any network
            compared = (schedule, recipe.data) == ("paper", table.recipe(cell).data)
            folder = network(
                recipe,
                cell.network or cell.title,
                cell.paper if compared and setup is None else None,
                setup is not None,
            )
            if setup is None:
                continue
            source = None if made_on is None else network(made_on, setup.name.removeprefix("from "), None, True)
            title = f"{folder.name}: {setup.name}"
            restored = {place: kept[place] for place in (folder, source) if place in kept}
            found.missing.append(Task(title, recipe, folder, None, table.measure, setup, source, images, restored))
    found.missing = in_order(found.missing)
    return found


def _in_folder(folder: Path, recipe: Recipe, ledger: Ledger) -> bool:
    """Return whether the trained network that counts is in its run folder, with its weights."""
    run = Run(folder) if (folder / "result.json").is_file() else None
    return (
        run is not None
        and run.checkpoint.is_file()
        and cell_of(run.recipe) == cell_of(recipe)
        and ledger.counts(recipe, run.result)
    )


def _of_what_counts(file: Path, recipe: Recipe, ledger: Ledger) -> bool:
    """Return whether a file has the weights of the network that counts, from which its run folder can be restored."""
    about = read_about(file)
    return cell_of(recorded(about["recipe"])) == cell_of(recipe) and ledger.counts(recipe, about.get("result"))


def in_order(tasks: Iterable[Task]) -> list[Task]:
    """Return each task once, networks before attacks, long attacks last, otherwise in the same order.

    A network that several tables have under other names is trained once, for the first of them.
    """
    once: dict[Hashable, Task] = {}
    for task in dict.fromkeys(tasks):
        once.setdefault(cell_of(task.recipe) if task.setup is None else task, task)
    return sorted(once.values(), key=lambda task: (task.setup is not None, task.setup is not None and task.setup.long))


def _matching(texts: dict[Cell, str], matches: Sequence[str], matched: set[str]) -> list[Cell]:
    """Return the cells that match, in the order of the matches; note which matches have found one."""
    having = {
        match: [cell for cell, text in texts.items() if match.removeprefix("!").lower() in text.lower()]
        for match in matches
    }
    matched |= {match for match, cells in having.items() if cells}
    wanted = [match for match in matches if not match.startswith("!")]
    unwanted = {cell for match in matches if match.startswith("!") for cell in having[match]}
    chosen = dict.fromkeys(cell for match in wanted for cell in having[match]) if wanted else texts
    return [cell for cell in chosen if cell not in unwanted]


def check_matches(plans: Sequence[Plan], matches: list[str] | None) -> None:
    """Raise if a match finds no cell in any of the plans."""
    for match in matches or []:
        if not any(match in one.matched for one in plans):
            names = [one.table.name for one in plans]
            which = f"the table {names[0]}" if len(names) == 1 else f"the tables {', '.join(names)}"
            titles = list(dict.fromkeys(cell.title for one in plans for cell in one.table.cells))
            close = difflib.get_close_matches(match.removeprefix("!"), titles, n=5, cutoff=0.0)
            raise ValueError(
                f"no cell of {which} has {match.removeprefix('!')!r} in its name; the nearest of {len(titles)} names: "
                f"{'; '.join(close)}. --list shows all"
            )


def _slug(title: str) -> str:
    """Return a folder name."""
    plain = title.lower().replace("ℓ2", "l2").replace("sq. cosine", "square cosine").replace(" schedule", "")
    return "-".join("".join(letter if letter.isascii() and letter.isalnum() else " " for letter in plain).split())


def costs(plans: list[Plan], ledger: Ledger) -> dict[str, float | None]:
    """Return by title how many seconds of the `usual_device` each missing task will take, None if unknown.

    This is estimated from finished tasks of the same network.
    """
    found: dict[str, float | None] = {}
    device = usual_device(ledger)
    entries = [entry for entry in ledger.entries if entry.record.get("device") == device and not entry.diverged]
    for task in (task for one in plans for task in one.missing):
        paces = sorted(_pace(entry) for entry in entries if _alike(entry, task))
        found[task.title] = paces[len(paces) // 2] * (1.0 if task.setup else _length(task.recipe)) if paces else None
    return found


def usual_device(ledger: Ledger) -> str | None:
    """Return the name of the device that most of the ledger was computed on; None if the ledger names none."""
    devices = Counter(entry.record["device"] for entry in ledger.entries if entry.record.get("device"))
    return max(devices, key=lambda name: devices[name], default=None)


def _alike(entry: Entry, task: Task) -> bool:
    kinds = [
        (r.model, r.data, r.batch, r.steps is None, r.adversarial, r.adversarial_share)
        for r in (entry.recipe, task.recipe)
    ]
    return kinds[0] == kinds[1] and entry.setup == (task.setup and task.setup.name)


def _pace(entry: Entry) -> float:
    return entry.gpu_seconds / (1.0 if entry.setup else _length(entry.recipe))


def _length(recipe: Recipe) -> float:
    return float(recipe.steps or recipe.epochs)
