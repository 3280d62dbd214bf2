"""Assembles the HTML page of a report as one self-contained file without scripts, and writes it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path
from typing import NamedTuple

from polyrhythm.errors import RunFolderError
from polyrhythm.files import atomic_write
from polyrhythm.observe.run_folder import REPORT_FILE, find_run
from polyrhythm.plugin import load_all
from polyrhythm.plugins.report import bars, figures, tables, updates
from polyrhythm.plugins.report.figures import Figure
from polyrhythm.plugins.report.read import Run, read_run

_STYLE = """
:root{color-scheme:light dark;--page:#fff;--ink:#1c2126;--soft:#59636e;--rule:#d5dae0;--lane:#f1f3f5;--faint:#c3cad2;
--s0:#1f6fb4;--s1:#c2570c;--s2:#1b7f5a;--s3:#7c4db8;--s4:#0f7c8a;--s5:#b3324b;--s6:#6b7280}
@media (prefers-color-scheme:dark){:root{--page:#15191e;--ink:#e6e9ed;--soft:#a2acb7;--rule:#39424c;--lane:#1e242b;
--faint:#46515d;--s0:#6bb1f2;--s1:#f0994f;--s2:#55c79a;--s3:#b998ee;--s4:#58c4d3;--s5:#f07f93;--s6:#9aa3b0}}
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--ink);font:16px/1.5 system-ui,sans-serif}
main{max-width:980px;margin:0 auto;padding:24px 16px 48px}
h1{font-size:1.6rem;line-height:1.25;margin:0 0 4px;overflow-wrap:anywhere}
h2{font-size:1.2rem;margin:40px 0 4px}
h3{font-size:1rem;margin:24px 0 4px;overflow-wrap:anywhere}
p{margin:4px 0 10px}.soft,figcaption{color:var(--soft)}
.notice{border-left:4px solid var(--s1);padding:4px 12px}
figure{margin:0}
figure svg{display:block;width:100%;height:auto}
.one{overflow-x:auto}.one>svg{min-width:640px}.one>svg.plot{min-width:0;overflow:visible}
.one:has(svg.plot){overflow:visible}.one>svg.plot:not(.wide){max-width:480px}
.pair{display:grid;grid-template-columns:repeat(auto-fit,minmax(320px,1fr));gap:8px 20px;align-items:center}
.pair.one{grid-template-columns:1fr}
.legend{list-style:none;display:flex;flex-wrap:wrap;gap:2px 20px;margin:4px 0 8px;padding:0;font-size:.875rem}
.legend li{display:flex;align-items:center;gap:6px}
figure svg.key,.key{flex:none;width:26px;height:12px}
text{font:13px system-ui,sans-serif;fill:var(--ink)}
.tick,.name{fill:var(--soft)}.tick{font-size:12px}.end{text-anchor:end}.middle{text-anchor:middle}
.value{font-weight:600;paint-order:stroke;stroke:var(--page);stroke-width:4px;stroke-linejoin:round}
.grid{stroke:var(--rule);stroke-width:1}.axis{stroke:var(--soft);fill:none}
.line{fill:none;stroke-width:2;stroke-linejoin:round}
.d1{stroke-dasharray:7 4}.d2{stroke-dasharray:2 3}.d3{stroke-dasharray:9 3 2 3}
.band{opacity:.17}.bar{fill:none;stroke-width:2}
.mark{stroke:var(--page);stroke-width:1}
.fault{fill:none;stroke:var(--s5);stroke-width:1.5;stroke-dasharray:3 3}
.change{fill:none;stroke:var(--soft);stroke-width:1.5;stroke-dasharray:6 3}
.lane{fill:var(--lane)}.fill.faint{fill:var(--faint)}.mark.plain{fill:var(--ink)}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(128px,1fr));gap:8px;margin:16px 0}
.tiles div{border:1px solid var(--rule);border-radius:6px;padding:8px 10px}
.tiles dt{color:var(--soft);font-size:.8125rem}
.tiles dd{margin:0}.tiles b{font-size:1.4rem;font-weight:600}
.tiles span{display:block;color:var(--soft);font-size:.8125rem;line-height:1.3}
.scroll{overflow-x:auto}
table{border-collapse:collapse;margin:8px 0 16px;font-variant-numeric:tabular-nums}
th,td{text-align:left;padding:4px 20px 4px 0;border-bottom:1px solid var(--rule);vertical-align:top}
thead th{color:var(--soft);font-weight:600}tbody th{font-weight:400;white-space:nowrap}
pre{overflow-x:auto;background:var(--lane);padding:12px;border-radius:6px;font-size:.8125rem;line-height:1.4}
.said tbody th,.said td:nth-of-type(2){font:.875rem/1.6 ui-monospace,monospace;white-space:pre-wrap;
overflow-wrap:anywhere}
.said tbody th{font-weight:600;padding-top:14px}.said td:nth-of-type(2n+1){white-space:nowrap}.said p{margin:0 0 4px}
summary{cursor:pointer}
@media (max-width:640px){svg.plot.wide .tick,svg.plot.wide .value{font-size:22px}svg.plot.wide .name{display:none}}
@media print{:root{--page:#fff;--ink:#000;--soft:#444;--rule:#bbb;--lane:#f1f3f5;--faint:#c3cad2;--s0:#1f6fb4;
--s1:#c2570c;--s2:#1b7f5a;--s3:#7c4db8;--s4:#0f7c8a;--s5:#b3324b;--s6:#6b7280}
body{font-size:11pt;-webkit-print-color-adjust:exact;print-color-adjust:exact}
main{max-width:none;padding:0}section,table,.tiles div{break-inside:avoid}h2,h3{break-after:avoid}
.scroll,.one{overflow:visible}section:has(details){display:none}}
"""
_SERIES = "".join(
    f".s{n}{{--c:var(--s{n})}}.line.s{n},.bar.s{n}{{stroke:var(--c)}}.fill.s{n},.band.s{n},.mark.s{n},.value.s{n}{{fill:var(--c)}}"
    for n in range(7)
)


class ReportSection(NamedTuple):
    """A plugin's section. after: heading of the preceding section, Results or Utilisation; draw: maps runs to its
    HTML, "" for none."""

    after: str
    draw: Callable[[Sequence[Run]], str]


def page(runs: Sequence[Run]) -> str:
    """The report of one run, or the comparison of several."""
    several = len(runs) > 1
    title = f"{len(runs)} runs compared" if several else runs[0].label
    notice = '<p class="notice">This run is not finished: here is what it has come to so far.</p>'
    parts = [f"<h1>{escape(title)}</h1>"]
    parts += [named(run, ("" if run.finished else notice) + tables.tiles(run), runs) for run in runs]
    parts.append(section("Settings that differ", tables.settings(runs)))
    parts.append(section("Warnings", *(named(run, tables.setbacks(run), runs) for run in runs)))
    parts_of_one = (tables.by_task, tables.by_samples, tables.by_metric)
    details = "" if several else "".join(part(runs[0]) for part in parts_of_one)
    parts.append(section("Results", tables.results(runs), details))
    added: Sequence[ReportSection] = load_all("report")
    parts += [one.draw(runs) for one in added if one.after == "Results"]
    draw = (
        figures.success,
        figures.returns,
        updates.env_metrics,
        updates.updates,
        figures.throughput,
        figures.utilisation,
    )
    parts += [figure_section(figure) for drawn in draw if (figure := drawn(runs)) is not None]
    parts += [one.draw(runs) for one in added if one.after == "Utilisation"]
    if (lag := figures.lag(runs)) is not None:
        parts.append(figure_section(lag))
    for run in runs:
        if (figure := bars.timeline(run)) is not None:
            heading = f"{figure.heading}: {run.label}" if several else figure.heading
            parts.append(figure_section(figure._replace(heading=heading)))
    wall = bars.wall_time(runs)
    if wall is not None:
        parts.append(figure_section(wall))
    parts.append(section("Ledger", tables.ledger(runs)))
    parts.append(section("Faults", *(named(run, tables.faults(run) + tables.set_aside(run), runs) for run in runs)))
    parts.append(section("Weights", *(named(run, tables.weights(run), runs) for run in runs)))
    parts.append(section("Settings that were changed", *(named(run, tables.changes(run), runs) for run in runs)))
    texts = [(escape(run.label), escape(run.config)) for run in runs]
    files = (f"<details><summary>{name}: config.yaml</summary><pre>{text}</pre></details>" for name, text in texts)
    parts.append(section("Configuration", *files))
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)} · Polyrhythm</title><style>{_STYLE}{_SERIES}</style></head>\n"
        f"<body><main>\n{chr(10).join(part for part in parts if part)}\n</main></body></html>\n"
    )


def named(run: Run, content: str, runs: Sequence[Run]) -> str:
    """The content, with the run's name as heading if there are several runs."""
    return f"<h3>{escape(run.label)}</h3>{content}" if content and len(runs) > 1 else content


def figure_section(figure: Figure, *more: str) -> str:
    """A section with a figure, followed by more HTML."""
    keys = "".join(f"<li>{key}{escape(text)}</li>" for key, text in figure.legend)
    legend = f'<ul class="legend">{keys}</ul>' if keys else ""
    kind = "pair" if len(figure.pictures) > 1 else "pair one"
    caption = f"<figcaption>{escape(figure.sentence)}</figcaption>"
    drawn = f'<div class="{kind}">{"".join(figure.pictures)}</div>'
    return section(figure.heading, f"<figure>{caption}{legend}{drawn}</figure>", *more)


def section(heading: str, *content: str) -> str:
    """A section of the page; "" without content."""
    inside = "".join(content)
    return f"<section><h2>{escape(heading)}</h2>{inside}</section>" if inside else ""


COMPARISON_FILE = "comparison.html"


def write_report(folders: Sequence[Path], path: Path | None = None) -> Path:
    """Write the page for these runs and return its path: the run's report.html, or comparison.html next to the first.

    RunFolderError: a folder is not a run's, or the page cannot be written.
    """
    folders = [find_run(folder) for folder in folders]
    runs = [read_run(folder) for folder in folders]
    try:
        text = page(runs)
    except (OSError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        names = " or ".join(str(folder) for folder in folders)
        raise RunFolderError(
            f"a file in {names} has invalid content ({type(error).__name__}: {error}); if it was not edited, "
            "please report this with the folder"
        ) from error
    if path is None:
        first = folders[0].resolve()
        path = folders[0] / REPORT_FILE if len(runs) == 1 else first.parent / COMPARISON_FILE
    try:
        with atomic_write(path) as unfinished:
            unfinished.write_text(text, encoding="utf-8")
    except OSError as error:
        raise RunFolderError(f"{path} cannot be written ({error.strerror}); name another with --out") from error
    return path
