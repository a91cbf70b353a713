//! Background work. The supervisor waits for it when it is closed.

use tokio::task::JoinSet;

use super::CLOSE_LIMIT;
use crate::supervisor::nursery_io::Nursery;

/// Background tasks that must finish before the supervisor is closed, such as the shutdown of a nursery.
#[derive(Debug, Default)]
pub(super) struct Retired(JoinSet<()>);

impl Retired {
    /// Runs `work` in the background. Must be called on the runtime thread.
    pub(super) fn add(&mut self, work: impl Future<Output = ()> + 'static) {
        while self.0.try_join_next().is_some() {}
        self.0.spawn_local(work);
    }

    /// Stops a nursery that is no longer needed.
    pub(super) fn add_nursery(&mut self, nursery: Nursery) {
        self.add(async { _ = nursery.end(false, CLOSE_LIMIT).await });
    }

    /// Makes the sentinel process of a dead nursery kill the nursery's leftover processes.
    pub(super) fn add_sentinel(&mut self, sentinel: Nursery) {
        self.add(sentinel.end_what_it_guards(CLOSE_LIMIT));
    }

    /// Waits until all background tasks have finished.
    pub(super) async fn finish(&mut self) {
        while self.0.join_next().await.is_some() {}
    }
}

#[cfg(test)]
mod tests {
    use tokio::sync::oneshot;
    use tokio::task::LocalSet;

    use super::*;

    #[tokio::test]
    async fn finish_waits_for_all_background_work() {
        let work = async {
            let (mut retired, (done, has_finished)) = (Retired::default(), oneshot::channel());
            retired.add(std::future::ready(()));
            retired.add(async move {
                tokio::task::yield_now().await;
                done.send(()).expect("the receiver is kept");
            });
            retired.finish().await;
            has_finished.await.expect("the work has finished");
        };
        LocalSet::new().run_until(work).await;
    }
}
