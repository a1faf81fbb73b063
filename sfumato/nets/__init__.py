"""Networks: generators."""
