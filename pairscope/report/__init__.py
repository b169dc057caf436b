"""The incident report: what happened, since when, why, what it costs and what to do, as Markdown with plots or as JSON."""
