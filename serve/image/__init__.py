"""Container images of a served artifact: a Dockerfile's folder, or an OCI image layout."""
