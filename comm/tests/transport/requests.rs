//! What a proxy is asked, and what it answers.

use ringsight_comm::proxy::{
    Error, ProxyAddress,
    client::ProxyClient,
    message::{Endpoint, Reply, Request, Transport},
};

use super::ranks::{PATIENCE, SLOT, turn, world};

#[test]
fn requests_are_answered_by_id_in_their_order_of_life() {
    let _turn = turn();
    world(&[1, 1], |rank| {
        let me = rank.rank();
        let address: ProxyAddress = rank.proxy.address().parse().unwrap();
        let client = || ProxyClient::connect(&address.unix, me, rank.abort.clone(), PATIENCE).unwrap();
        let endpoint = Endpoint {
            comm: 0,
            peer: 1 - me,
            channel: 7,
            p2p: true,
            is_send: false,
            transport: Transport::Shm,
        };
        let cookie = rank.bootstrap.cookie();
        let refused = |client: &ProxyClient, request: Request, why: &str| match client.call_blocking(&request)
        {
            Err(Error::Refused(text)) => assert!(text.contains(why), "{text}"),
            other => panic!("{request:?}: {other:?}"),
        };
        let stranger = client();
        refused(&stranger, Request::GetFd { handle: 0 }, "no Init");
        refused(&stranger, Request::Stop, "no Init");
        refused(
            &stranger,
            Request::Init {
                cookie: cookie ^ 1,
                rank: me,
                endpoint,
            },
            "secret",
        );

        let client = client();
        let init = |endpoint| Request::Init {
            cookie,
            rank: me,
            endpoint,
        };
        refused(&client, init(Endpoint { peer: me, ..endpoint }), "no connection");
        refused(&client, init(Endpoint { peer: 2, ..endpoint }), "no connection");
        refused(
            &client,
            init(Endpoint {
                channel: 64,
                ..endpoint
            }),
            "channel 64",
        );
        let foreign = Request::Init {
            cookie,
            rank: 1 - me,
            endpoint: Endpoint {
                is_send: true,
                ..endpoint
            },
        };
        refused(&client, foreign, "no more");
        // Asked without waiting, taken in another order than answered.
        let ids: Vec<_> = (0..3)
            .map(|_| client.call_async(&init(endpoint)).unwrap())
            .collect();
        let replies: Vec<_> = ids
            .iter()
            .rev()
            .map(|id| client.wait_for(*id).unwrap().outcome.unwrap())
            .collect();
        let Reply::Init { connection } = replies[0] else {
            panic!("{replies:?}")
        };
        assert_eq!(replies, [replies[0]; 3], "one endpoint, one connection");
        assert!(client.poll(ids[0]).unwrap().is_none(), "a response is given once");
        refused(&client, Request::Setup { connection }, "before SharedInit");
        refused(
            &client,
            Request::Connect {
                connection,
                address: None,
            },
            "before Setup",
        );
        refused(
            &client,
            Request::SharedInit {
                connection,
                slot_bytes: 1,
            },
            "NCCL_BUFFSIZE",
        );
        let shared = client
            .call_blocking(&Request::SharedInit {
                connection,
                slot_bytes: SLOT as u32,
            })
            .unwrap();
        assert_eq!(shared, Reply::SharedInit);
        let Reply::Setup { handle, .. } = client.call_blocking(&Request::Setup { connection }).unwrap()
        else {
            panic!("no handle");
        };
        refused(&client, Request::GetFd { handle: handle ^ 1 }, "handle");
        drop((client.get_fd(handle).unwrap(), client.get_fd(handle).unwrap()));
        assert_eq!(
            client
                .call_blocking(&Request::Connect {
                    connection,
                    address: None
                })
                .unwrap(),
            Reply::Connect
        );
        assert_eq!(client.call_blocking(&Request::Stop).unwrap(), Reply::Stop);
        assert_eq!(
            client.call_blocking(&Request::Destroy { connection }).unwrap(),
            Reply::Destroy
        );
        refused(&client, Request::Destroy { connection }, "no connection");
        refused(&client, Request::GetFd { handle }, "handle");
        rank.bootstrap.barrier().unwrap();
        // A proxy that is gone is an error, not a wait.
        let (abort, unix) = (rank.abort.clone(), address.unix.clone());
        drop(rank);
        assert!(matches!(
            client.call_blocking(&Request::Stop),
            Err(Error::PeerLost(_))
        ));
        assert!(matches!(
            ProxyClient::connect(&unix, me, abort, PATIENCE),
            Err(Error::PeerLost(_))
        ));
    });
}
