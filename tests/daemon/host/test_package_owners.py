from daemon.host.package_owners import OWNERS, foreign_owners


def test_no_other_distribution_owns_our_package_names() -> None:
    assert foreign_owners() == {}


def test_our_packages_are_the_folders_of_the_repository_and_the_client() -> None:
    assert set(OWNERS) == {"coserve_client", "daemon", "experts", "routing_rules", "tools"}
