//! Programs that nurseries run.

use elasticrs_nursery::launch::NurseryImage;

use crate::spec::GroupSpec;

/// Programs that can be run as the nursery process, in order of preference.
#[derive(Debug)]
pub(super) struct Images(Vec<NurseryImage>);

impl Images {
    pub(super) fn new(images: Vec<NurseryImage>) -> Self {
        Self(images)
    }

    pub(super) fn all(&self) -> Vec<NurseryImage> {
        self.0.clone()
    }

    /// Makes all later nursery processes start without importing modules in advance.
    pub(super) fn forget_warm(&mut self) {
        self.0.retain(|image| !is_warm(image));
    }

    /// Returns the programs that can be run as the nursery of this group. Omits programs that import modules in advance
    /// if no worker needs these modules, because the imports would delay the start of the group.
    pub(super) fn fitting(&self, spec: &GroupSpec) -> Vec<NurseryImage> {
        let has_warm_workers = spec.processes.iter().any(|process| process.warm);
        self.0.iter().filter(|image| has_warm_workers || !is_warm(image)).cloned().collect()
    }
}

fn is_warm(image: &NurseryImage) -> bool {
    matches!(image, NurseryImage::Warm(_))
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::time::Duration;

    use super::*;
    use crate::supervisor::start::tests::group;
    use elasticrs_nursery::launch::Warm;
    use elasticrs_nursery::spec::ProcessSpec;

    fn images() -> Images {
        let report = nix::sys::memfd::memfd_create(c"report", nix::sys::memfd::MFdFlags::MFD_CLOEXEC).unwrap();
        let process = ProcessSpec::new(Vec::new(), Vec::new());
        let warm = Warm { process, ignored: Vec::new(), report, limit: Duration::ZERO };
        Images::new(vec![NurseryImage::Warm(Arc::new(warm)), NurseryImage::Embedded(b"")])
    }

    #[test]
    fn a_group_without_warm_workers_gets_a_cold_nursery() {
        assert!(matches!(images().fitting(&group(true))[..], [NurseryImage::Warm(_), NurseryImage::Embedded(_)]));
        assert!(matches!(images().fitting(&group(false))[..], [NurseryImage::Embedded(_)]));
    }

    #[test]
    fn a_failed_import_leaves_only_cold_nurseries() {
        let mut images = images();
        images.forget_warm();
        assert!(matches!(images.all()[..], [NurseryImage::Embedded(_)]));
        assert!(matches!(images.fitting(&group(true))[..], [NurseryImage::Embedded(_)]));
    }
}
