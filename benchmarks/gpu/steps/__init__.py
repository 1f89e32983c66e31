"""The steps, a module each: `run(job)` writes results to `job.record`."""
