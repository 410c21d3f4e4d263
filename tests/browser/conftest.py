"""A real Chromium on a real server. A page that logs an error or leaves its origin fails the test at its end."""

import shutil
import socket
import threading

import pytest
import uvicorn
from axe_playwright_python.sync_playwright import Axe

from tests.helpers.samples import FILES, write_checkpoint, write_mixed_run
from treeckpt_dashboard.web.app import create_app

playwright_api = pytest.importorskip("playwright.sync_api")
playwright_api.expect.set_options(timeout=60_000)  # for what hangs; a loaded machine takes its time


@pytest.fixture(scope="session")
def chromium():
    """The system's own Chromium, headless."""
    program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if program is None:
        pytest.fail("no Chromium on PATH; `make chromium` installs it")
    with playwright_api.sync_playwright() as playwright:
        arguments = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        browser = playwright.chromium.launch(executable_path=program, args=arguments, timeout=120_000)
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def serve():
    """Starts servers in threads; gives each one's address."""
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
    for server, thread in running:
        server.should_exit = True
        thread.join(60)


@pytest.fixture(scope="session")
def run(tmp_path_factory):
    run = write_mixed_run(tmp_path_factory.mktemp("browser") / "gpt")
    write_checkpoint(run / "step_00000700", step=700, metadata={"note": "warm-up done"}, files=FILES)
    return run


@pytest.fixture(scope="session")
def address(serve, run):
    return serve(run)


@pytest.fixture
def watched(chromium):
    """Opens pages; afterwards, none may have logged an error, broken the policy or asked another origin."""
    contexts, troubles = [], []

    def make(address, *, clock=False, **options):
        """With `clock`, the page's own time stands still but for `page.clock.run_for`."""
        origin = "/".join(address.split("/")[:3])
        context = chromium.new_context(viewport={"width": 1280, "height": 900}, **options)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(60_000)
        page.on("console", lambda m: troubles.append(m.text) if m.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: troubles.append(str(error)))
        page.on(
            "requestfailed", lambda r: troubles.append(f"failed {r.url}") if "ERR_ABORTED" not in r.failure else None
        )
        page.on("request", lambda r: troubles.append(f"off origin {r.url}") if not r.url.startswith(origin) else None)
        page.add_init_script(
            "addEventListener('securitypolicyviolation', (e) => console.error('CSP ' + e.violatedDirective))"
        )
        if clock:
            page.clock.install(time=0)
            page.clock.pause_at(1000)
        page.goto(address)
        return page

    yield make
    for context in contexts:
        context.close()
    assert troubles == []


@pytest.fixture
def page(watched, address):
    return watched(address)


@pytest.fixture(scope="session")
def accessible():
    """Asserts that axe finds nothing to object to on a page as it is now."""
    axe = Axe()

    def check(page, name, only=None):
        options = {"preload": False, "resultTypes": ["violations"]} | ({"runOnly": [only]} if only else {})
        found = axe.run(page, options=options)
        rules = [(v["id"], [n["html"][:150] for n in v["nodes"][:3]]) for v in found.response["violations"]]
        assert rules == [], name

    return check
