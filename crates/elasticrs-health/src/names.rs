//! Checks the host name in the `Host` header of a request.
//!
//! A browser lets a web page read responses from the page's own host name. The owner of that name can make it resolve
//! to this machine (DNS rebinding). The `Host` header of the page's requests still contains the foreign name. Therefore
//! data about the job is returned only if the header contains a name of this machine. IP addresses are accepted,
//! because they are not resolved. Requests without a `Host` header are accepted, because browsers always send this
//! header.

use std::fs;
use std::net::{IpAddr, Ipv6Addr};

/// Returns true if this `Host` header contains an IP address or a name of this machine, or if there is no header.
/// `listens_on`, the host on which the server listens, also counts as a name of this machine.
///
/// Reads a few files, unless the name is an address, `localhost` or `listens_on`. Does not resolve names, because that
/// may take a long time and depends on other machines.
pub fn is_ours(host: Option<&str>, listens_on: &str) -> bool {
    let Some(name) = host.map(without_port).filter(|name| !name.is_empty()) else { return true };
    if is_address_or_loopback(&name) {
        return true;
    }
    // Treat a missing or unreadable file as empty.
    let read = |path| fs::read_to_string(path).unwrap_or_default();
    let machine = nix::sys::utsname::uname().map(|uts| uts.nodename().to_string_lossy().into_owned());
    let machine = plain(&machine.unwrap_or_default());
    name == plain(listens_on) || is_of_machine(&name, &machine, &read("/etc/hosts"), &read("/etc/resolv.conf"))
}

/// Normalises a name for comparison: lower case, without a trailing dot.
fn plain(name: &str) -> String {
    name.strip_suffix('.').unwrap_or(name).to_ascii_lowercase()
}

fn without_port(host: &str) -> String {
    let is_port = |port: &str| port.bytes().all(|byte| byte.is_ascii_digit());
    plain(match host.rsplit_once(':') {
        // Look for the port after the last colon, because an IPv6 address in brackets also contains colons.
        Some((name, port)) if is_port(port) => name,
        _ => host,
    })
}

fn is_address_or_loopback(name: &str) -> bool {
    let in_brackets = name.strip_prefix('[').and_then(|rest| rest.strip_suffix(']'));
    let is_address = in_brackets.map_or_else(
        || name.parse::<IpAddr>().is_ok(),
        // A link-local address can end with `%` and the name of an interface.
        |address| address.split('%').next().unwrap_or_default().parse::<Ipv6Addr>().is_ok(),
    );
    is_address || matches!(name, "localhost" | "ip6-localhost" | "ip6-loopback") || name.ends_with(".localhost")
}

/// Returns true if `name` belongs to this machine: it is the machine's own name, an alias of that name in `/etc/hosts`,
/// or that name followed by a domain from `/etc/resolv.conf`.
fn is_of_machine(name: &str, machine: &str, hosts: &str, resolver: &str) -> bool {
    let short = machine.split('.').next().unwrap_or_default();
    if short.is_empty() {
        return false;
    }
    let is_own = |candidate: &str| candidate == machine || candidate == short;
    let without_comment = |line: &str| plain(line.split(['#', ';']).next().unwrap_or_default());
    let is_alias = |line: &str| {
        let line = without_comment(line);
        let names = || line.split_ascii_whitespace().skip(1).map(plain);
        names().any(|own| is_own(&own)) && names().any(|alias| alias == name)
    };
    let is_in_domain = |line: &str| {
        let line = without_comment(line);
        let mut words = line.split_ascii_whitespace();
        let domains = matches!(words.next(), Some("search" | "domain")).then_some(words).into_iter().flatten();
        let mut hosts = domains.filter_map(|domain| name.strip_suffix(&plain(domain))?.strip_suffix('.'));
        hosts.any(is_own)
    };
    is_own(name) || hosts.lines().any(is_alias) || resolver.lines().any(is_in_domain)
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOSTS: &str =
        "127.0.0.1 localhost evil\n# 10.0.0.1 node1 no.example\n10.0.0.1 Node1.cluster.example node1 a # b\n";
    const RESOLVER: &str = "nameserver 10.0.0.2\nsearch example rack.example. svc.example\ndomain old.example\n";

    #[test]
    fn addresses_loopback_names_and_the_configured_host_are_accepted() {
        for host in
            ["127.0.0.1:80", "10.1.2.3", "[::1]:8080", "[fe80::1%eth0]", "localhost", "LocalHost.:1", "a.localhost"]
        {
            assert!(is_ours(Some(host), "0.0.0.0"), "{host}");
        }
        assert!(is_ours(None, "x") && is_ours(Some(""), "x") && is_ours(Some("Metrics.Example:9"), "metrics.example"));
        for host in ["evil.example", "localhost.evil.example", "127.0.0.1.evil.example:80", "[evil]", "xlocalhost"] {
            assert!(!is_ours(Some(host), "127.0.0.1"), "{host}");
        }
    }

    #[test]
    fn host_names_aliases_and_search_domains_of_the_machine_are_accepted() {
        let ours = |name, machine| is_of_machine(name, machine, HOSTS, RESOLVER);
        for name in
            ["node1", "node1.cluster.example", "a", "node1.rack.example", "node1.svc.example", "node1.old.example"]
        {
            assert!(ours(name, "node1"), "{name}");
            assert!(ours(name, "node1.cluster.example"), "{name}");
        }
        assert!(ours("node1.cluster.example.svc.example", "node1.cluster.example"));
        for name in [
            "evil",
            "no.example",
            "b",
            "node2",
            "node1.evil.example",
            "rack.example",
            "xnode1.rack.example",
            "10.0.0.1",
        ] {
            assert!(!ours(name, "node1"), "{name}");
        }
        assert!(!is_of_machine("", "", HOSTS, RESOLVER) && !is_of_machine(".rack.example", "", "", RESOLVER));
    }
}
