"""What the tests of figures ask of a drawn one: its texts and cells, what overlaps, what lies outside."""

from itertools import pairwise

import matplotlib.text


def cells(ax):
    [image] = ax.images
    return image.get_array()


def texts(ax):
    return [text.get_text() for text in ax.texts]


def overlaps(labels):
    """Whether any two texts of an axis cover each other, as drawn."""
    boxes = [label.get_window_extent() for label in labels if label.get_text()]
    return any(a.overlaps(b) for a, b in pairwise(boxes))


def inside(figure):
    """The texts that do not lie within the figure: none."""
    figure.canvas.draw()
    whole = figure.bbox.padded(2)
    axes = [one for ax in figure.axes for one in (ax, *ax.child_axes)]
    unseen = {label for ax in axes for axis in (ax.xaxis, ax.yaxis) for tick in (*axis.majorTicks, *axis.minorTicks)
              for label in (tick.label1, tick.label2)
              if not min(axis.get_view_interval()) <= tick.get_loc() <= max(axis.get_view_interval())}
    found = [text for text in figure.findobj(matplotlib.text.Text) if text.get_visible() and text.get_text().strip()]
    boxes = [(text.get_text(), text.get_window_extent()) for text in found if text not in unseen]
    return [name for name, box in boxes if not (whole.x0 <= box.x0 and box.x1 <= whole.x1 and whole.y0 <= box.y0
                                                and box.y1 <= whole.y1)]
