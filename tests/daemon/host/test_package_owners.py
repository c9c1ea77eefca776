from daemon.host.package_owners import PACKAGES, foreign_owners


def test_no_other_distribution_owns_our_package_names() -> None:
    assert foreign_owners() == {}


def test_our_packages_are_the_folders_of_the_repository() -> None:
    assert PACKAGES == ("daemon", "experts", "routing_rules", "tools")
