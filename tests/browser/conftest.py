"""A real Chromium on a real server. A page that logs an error or leaves its origin fails the test at its end."""

import contextlib
import shutil
import socket
import threading

import httpx
import pytest
import uvicorn
from axe_playwright_python.sync_playwright import Axe

from tests.browser.helpers import WIDE
from tests.helpers.samples import FILES, write_checkpoint, write_mixed_run
from treeckpt_dashboard.runs import finder
from treeckpt_dashboard.web.app import create_app

playwright_api = pytest.importorskip("playwright.sync_api")
playwright_api.expect.set_options(timeout=60_000)  # for what hangs; a loaded machine takes its time


@pytest.fixture(scope="session", autouse=True)
def unhurried_search():
    """Has a search look for leaves in each run, however long a busy machine takes to read their indexes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(finder, "LEAF_SECONDS", 60.0)
        yield


@pytest.fixture(scope="session")
def chromium():
    """The system's own Chromium, headless; its headless shell, where it has that, takes a third less of processors."""
    names = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
    program = next(filter(None, map(shutil.which, names)), None)
    if program is None:
        pytest.fail("no Chromium on PATH; `make chromium` installs it")
    with playwright_api.sync_playwright() as playwright:
        arguments = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        browser = playwright.chromium.launch(executable_path=program, args=arguments, timeout=120_000)
        yield browser
        browser.close()


def _serving():
    """Gives what starts servers in threads, and returns each one's address; ends them, and the files they have open."""
    running = []

    def make(*runs, **options):
        listening = socket.create_server(("127.0.0.1", 0))
        config = uvicorn.Config(create_app(runs, **options), log_level="warning", access_log=False)
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
        thread.start()
        running.append((server, thread))
        return f"http://127.0.0.1:{listening.getsockname()[1]}"

    yield make
    for server, _ in running:
        server.should_exit = True
    for _, thread in running:
        thread.join(60)


serve = pytest.fixture(_serving)
serve_module = pytest.fixture(_serving, scope="module")
serve_session = pytest.fixture(_serving, scope="session")


@pytest.fixture(scope="session")
def run(tmp_path_factory):
    run = write_mixed_run(tmp_path_factory.mktemp("browser") / "gpt")
    write_checkpoint(run / "step_00000700", step=700, metadata={"note": "warm-up done"}, files=FILES)
    return run


@pytest.fixture(scope="session")
def address(serve_session, run):
    return serve_session(run)


@pytest.fixture(scope="session")
def new_page(chromium):
    def make(**options):
        page = chromium.new_context(viewport=WIDE, **options).new_page()
        page.set_default_timeout(60_000)
        page.add_init_script(
            "addEventListener('securitypolicyviolation', (e) => console.error('CSP ' + e.violatedDirective))"
        )
        return page

    return make


@pytest.fixture(scope="session")
def kept_pages(new_page):
    """Gives one page for each set of options: a renderer's start and an empty HTTP cache cost each test 0.5 s."""
    pages = {}

    def page(**options):
        if options.get("color_scheme") == "light":  # as without
            del options["color_scheme"]
        if str(options) not in pages:
            pages[str(options)] = new_page(**options)
        return pages[str(options)]

    return page


@pytest.fixture
def watched(new_page, kept_pages, serve):
    """Opens pages; afterwards, none may have logged an error, broken the policy or asked another origin.

    The servers of the test end after its pages have left them.

    The page of a test before is opened again, without what it stored, at its first size.
    """
    pages, troubles = [], []

    def make(address, *, clock=False, **options):
        """With `clock`, the page's own time stands still but for `page.clock.run_for`."""
        origin = "/".join(address.split("/")[:3])
        page = new_page(**options) if clock else kept_pages(**options)
        listeners = {
            "console": lambda m: troubles.append(m.text) if m.type in ("error", "warning") else None,
            "pageerror": lambda error: troubles.append(str(error)),
            "requestfailed": lambda r: troubles.append(f"failed {r.url}") if "ERR_ABORTED" not in r.failure else None,
            "request": lambda r: troubles.append(f"off origin {r.url}") if not r.url.startswith(origin) else None,
        }
        for event, listener in listeners.items():
            page.on(event, listener)
        pages.append((page, clock, listeners))
        if clock:
            page.clock.install(time=0)
            page.clock.pause_at(1000)
        page.goto(address)
        return page

    yield make
    for page, clock, listeners in pages:
        if clock:
            page.context.close()
            continue
        page.evaluate("localStorage.clear(); sessionStorage.clear()")
        # the page itself goes there: a renderer is kept, which costs 0.2 s less than a new one
        with contextlib.suppress(playwright_api.Error):  # the answer may be lost with the page
            page.evaluate("location.replace('about:blank')")
        page.wait_for_url("about:blank")
        page.set_viewport_size(WIDE)
        page.mouse.move(0, 0)
        for event, listener in listeners.items():
            page.remove_listener(event, listener)
    assert troubles == []


@pytest.fixture
def page(watched, address):
    return watched(address)


@pytest.fixture(scope="session")
def step_700(address):
    """The address of the page of step 700."""
    [found] = httpx.get(f"{address}/api/v1/runs", timeout=60).json()["runs"]
    return f"{address}/checkpoints/" + next(each["id"] for each in found["checkpoints"] if each["step"] == 700)


@pytest.fixture(scope="session")
def accessible():
    """Asserts that axe finds nothing to object to on a page as it is now."""
    script = Axe().axe_script
    # what passed is not sent here: that takes 0.2 s of 0.7 s
    run = """(options) => axe.run(options).then(({ violations }) => violations.map((v) =>
        [v.id, v.nodes.slice(0, 3).map((n) => n.html.slice(0, 150))]))"""

    def check(page, name, only=None):
        options = {"preload": False, "resultTypes": ["violations"]} | ({"runOnly": [only]} if only else {})
        page.evaluate(script)
        assert page.evaluate(run, options) == [], name

    return check
