"""Charts as SVG, where matplotlib is installed."""
import contextlib

from driver.numbers import median
from driver.results import Bars

pyplot = None
with contextlib.suppress(ImportError):
    import matplotlib
    matplotlib.use("svg")
    matplotlib.rcParams.update({"svg.hashsalt": "retrysafe", "font.size": 9, "axes.spines.top": False,
                                "axes.spines.right": False})
    from matplotlib import pyplot


def draw(chart, file):
    """False where it cannot be drawn."""
    if pyplot is None:
        return False
    figure, axes = pyplot.subplots(figsize=(7, 0.45 * len(chart.series) + 1 if isinstance(chart, Bars) else 3.5))
    if isinstance(chart, Bars):
        labels = list(chart.series)
        middles = [median(values) for values in chart.series.values()]
        below = [m - min(v) for m, v in zip(middles, chart.series.values())]
        above = [max(v) - m for m, v in zip(middles, chart.series.values())]
        colours = ["#3b6ea5" if label.startswith("retrysafe") else "#b0b0b0" for label in labels]
        axes.barh(labels, middles, xerr=(below, above), color=colours, capsize=2)
        axes.invert_yaxis()
        axes.set_xlabel(chart.unit)
    else:
        for label, points in chart.series.items():
            axes.plot(*zip(*points), label=label)
        axes.set_xlabel(chart.x)
        axes.set_ylabel(chart.y)
        axes.set_ylim(bottom=0)
        axes.legend()
    axes.set_title(chart.title, loc="left")
    figure.savefig(file, bbox_inches="tight", metadata={"Date": None})
    pyplot.close(figure)
    return True
