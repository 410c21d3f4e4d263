"""The queue of processes: a job that fails in any way ends, and another one of its key can be started."""

from treeckpt_dashboard.store.jobs import JobQueue, ProcessJob


class _FailingJob(ProcessJob):
    def finish(self) -> None:
        self.state = "running"
        raise ValueError("no such message")


def test_a_job_that_fails_without_an_error_of_a_process_ends():
    jobs = JobQueue[_FailingJob]()
    job = jobs.add("key", lambda: _FailingJob("store.index_reader", []))
    assert job.over.wait(60)
    assert (job.state, job.error, job.open) == ("failed", "ValueError: no such message", False)
    again = jobs.add("key", lambda: _FailingJob("store.index_reader", []))
    assert again is not job and again.over.wait(60)
