"""How Sphinx builds the site: `make docs`, without network, every warning an error."""

import os
import re
import threading
import time
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path

import attnc

HERE = Path(__file__).resolve().parent

project = "attnc"
author = "the attnc developers"
copyright = author
release = version = attnc.__version__
language = "en"

extensions = [
    "sphinx.ext.autodoc", "sphinx.ext.autosummary", "sphinx.ext.intersphinx", "sphinx.ext.mathjax", "numpydoc",
    "myst_parser", "sphinx_design", "sphinx_copybutton", "sphinx_gallery.gen_gallery"]
exclude_patterns = ["inventories/*", "gallery/*"]       # of the gallery, what auto_gallery is made from
templates_path = ["_templates"]
nitpicky = True
# Of these there is no inventory.
nitpick_ignore_regex = [("py:obj", r"(numpy|matplotlib|torch|transformers|jax|keras|onnx)\..*")]
suppress_warnings = ["config.cache"]    # the gallery's functions; every build reads all pages

# Pages
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
myst_fence_as_directive = []
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True
copybutton_exclude = ".linenos, .gp, .go"

# The reference: numpydoc sections; types of arguments stand in the docstrings, with their shapes.
autosummary_generate = True
autosummary_imported_members = False
autodoc_typehints = "none"
autodoc_default_options = {"member-order": "bysource"}
autodoc_mock_imports = [name for name in ("jax", "keras", "onnx", "mpi4py", "dask", "torch", "transformers")
                        if find_spec(name) is None]
numpydoc_show_class_members = False
numpydoc_xref_param_type = False
default_role = "autolink"

# Names that pages of other projects explain: the inventories are in the repository.
intersphinx_mapping = {name: (address, f"inventories/{name}.inv") for name, address in {
    "python": "https://docs.python.org/3/", "scipy": "https://docs.scipy.org/doc/scipy/",
    "dask": "https://docs.dask.org/en/stable/", "mpi4py": "https://mpi4py.readthedocs.io/en/stable/"}.items()}

# The gallery
os.environ |= {"MPLBACKEND": "agg", "KERAS_BACKEND": "torch"}


def peak_memory(function):
    """Megabytes that the process grew by at most while the function ran, and what it returned."""
    page = os.sysconf("SC_PAGE_SIZE")

    def resident():
        return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * page

    before = peak = resident()
    done = threading.Event()

    def watch():
        nonlocal peak
        while not done.is_set():
            peak = max(peak, resident())
            time.sleep(0.01)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        result = function()
    finally:
        done.set()
        watcher.join()
    return (peak - before) / 2 ** 20, result


def described_figures(block, block_vars, gallery_conf):
    """Save the open figures of a block, each with its label as the text for those who do not see it."""
    from matplotlib import pyplot
    from sphinx_gallery.scrapers import figure_rst

    found = []
    for number in pyplot.get_fignums():
        figure = pyplot.figure(number)
        text = figure.get_label()
        if len(text) < 20:
            raise ValueError(f"{block_vars['src_file']}, line {block[2]}: figure.set_label() must say what it shows")
        path = next(block_vars["image_path_iterator"])
        figure.savefig(path, dpi=110, metadata={"Description": text})
        found.append(figure_rst([path], gallery_conf["src_dir"], text))
    pyplot.close("all")
    return "".join(found)


sphinx_gallery_conf = {
    "examples_dirs": "gallery",
    "gallery_dirs": "auto_gallery",
    "filename_pattern": rf"/({os.environ.get('EXAMPLES') or '.*'})\.py$",
    "within_subsection_order": "FileNameSortKey",
    "abort_on_example_error": True,
    "download_all_examples": False,
    "remove_config_comments": True,
    "show_memory": peak_memory,
    "image_scrapers": (described_figures,),
    "reference_url": {"attnc": None},
    "doc_module": ("attnc",),
    "backreferences_dir": "api/backreferences",
    "default_thumb_file": str(HERE / "figures" / "heatmap.png"),
    "matplotlib_animations": False,
    "min_reported_time": 0,
    "write_computation_times": False,       # each page says its own; the table of all is hard to read in the dark
}

# Appearance
html_theme = "pydata_sphinx_theme"
html_title = "attnc"
html_static_path = ["_static"]
html_css_files = ["attnc.css"]
html_show_sourcelink = False
html_sidebars = {"semantics": [], "new": [], "index": []}       # pages without others below them
html_theme_options = {
    "navigation_with_keys": True,
    "show_toc_level": 2,
    "navbar_align": "left",
    "header_links_before_dropdown": 6,
    "footer_start": ["copyright"],
    "footer_end": ["sphinx-version"],
    "secondary_sidebar_items": ["page-toc"],
    "pygments_light_style": "a11y-high-contrast-light",
    "pygments_dark_style": "a11y-high-contrast-dark",
}


def is_foreign(app, what, name, obj, skip, options):
    """Whether a class has a member from a class of another library, whose own pages explain it."""
    obj = getattr(obj, "fget", None) or getattr(obj, "__func__", None) or getattr(obj, "__wrapped__", None) or obj
    module = getattr(obj, "__module__", None) or "attnc"
    return True if not module.startswith("attnc") else None


def see_also():
    """For each public name of attnc the names to look at next: its definition, and its section of the reference."""
    text, found = (HERE / "api" / "index.md").read_text(encoding="utf-8"), {}
    for section in re.split("^## ", text, flags=re.MULTILINE):
        names = re.findall(r"^   ([\w.]+)$", section, flags=re.MULTILINE)
        for at, name in enumerate(names):
            near = [other for other in names[max(0, at - 3):at + 4] if other != name]
            twin = [f"reference.{name}"] if name in attnc.reference.__all__ else []
            found[f"attnc.{name}"] = [f"attnc.{other}" for other in twin + near]
    return found


SEE_ALSO = see_also()


def add_see_also(app, what, name, obj, options, lines):
    """The section "See Also" of what a page is about, for numpydoc, which comes next."""
    page = Path(app.env.docname).name
    if page in SEE_ALSO and name.rpartition(".")[2] == page.rpartition(".")[2] and what != "attribute":
        lines += ["", "See Also", "--------", *SEE_ALSO[page]]


def public_name(app, env, node, contnode):
    """The page of a name that a docstring gives without `attnc.`, from another module of it."""
    if node.get("refdomain") == "py":
        domain, name = env.get_domain("py"), f"attnc.{node['reftarget']}"
        return domain.resolve_xref(env, node["refdoc"], app.builder, "obj", name, node, contnode)
    return None


def draw_figures(app):
    """The figures of the pages on how it works, which are not committed."""
    spec = spec_from_file_location("drawings", HERE / "how" / "drawings.py")
    drawings = module_from_spec(spec)
    spec.loader.exec_module(drawings)
    drawings.draw(HERE / "how" / "figures")


def setup(app):
    app.connect("autodoc-skip-member", is_foreign)
    app.connect("autodoc-process-docstring", add_see_also, priority=400)
    app.connect("builder-inited", draw_figures)
    app.connect("missing-reference", public_name)
