/* SPDX-License-Identifier: GPL-2.0 */
/*
 * A stand-in for the firmware of ConnectX devices, on which the kernel's own drivers mlx5_core and mlx5_ib run.
 *
 * A PCI host bridge whose configuration space is emulated carries N functions (pci.c). Their BAR 0 lies in memory
 * that the kernel was told to leave alone (memmap=SIZE$BASE on its command line). A kernel thread plays the
 * firmware (firmware.c): it serves the command queue, keeps the health counter going, writes event queue entries
 * and raises the interrupts. It also plays the data path (data.c): it reads the doorbell records in memory and
 * carries RC sends, RDMA writes and reads between the functions.
 *
 *   insmod fakehca.ko base=0x1c000000 n=2 [ports=2]
 *
 * Faults are written to /sys/kernel/debug/fakehca (faults.c); README.md beside this folder lists them. What the
 * answers, error codes and times are is this module's choice, not a ConnectX's.
 */
#ifndef FAKEHCA_H
#define FAKEHCA_H

#include <linux/module.h>
#include <linux/pci.h>
#include <linux/irq_work.h>
#include <linux/mutex.h>
#include <linux/slab.h>
#include <linux/smp.h>
#include <linux/xarray.h>
#include <linux/mlx5/driver.h>
#include <linux/mlx5/device.h>
#include <linux/mlx5/mlx5_ifc.h>
#include <linux/mlx5/qp.h>
#include <linux/mlx5/cq.h>

#define BARSZ (8ul << 20)
#define MAXD 4
#define MAXP 2
#define NEQ 64
#define MSIX_OFF 0x6000

struct feq {
	bool on;
	u8 eqn;
	int intr;
	u32 log, pi;
	u64 mask[4];
	u64 *pas;
	int npas;
	u32 page_shift;
};

struct fbuf {
	u64 *pas;
	int npas;
	u32 shift, off;
};

struct fcq {
	u32 cqn, log, pi, eqn, last_arm;
	bool big;
	bool failed; /* nothing is put into it any more */
	struct fbuf b;
	__be32 *dbr;
};

struct fmk {
	u32 idx;
	u8 mode;
	u64 start, len;
	u32 shift;
	u64 *pas;
	int npas;
};

struct fqp {
	u32 qpn;
	u8 state;
	u8 st;
	u32 cqn_snd, cqn_rcv, rqpn, uidx;
	struct fbuf b;
	u8 log_sq, log_rq, rq_shift;
	bool sq, rq;
	u32 sq_off;
	__be32 *dbr;
	u16 sq_head, rq_head;
	u16 rlid;
	u8 port; /* from 0 */
	u8 ack_timeout, retry, rnr_retry;
	bool refuse; /* what comes next is answered with an error */
	bool mute; /* until it is reset nothing of it completes, and nothing is flushed */
	u64 stall;
};

struct fvec {
	int irq; /* looked up in process context: pci_irq_vector() sleeps */
	struct irq_work iw;
	call_single_data_t csd;
};

struct fport {
	bool up;
	bool lossy; /* packets from and to it are lost */
	bool lose_imm; /* writes with an immediate from it are lost */
	u16 lid;
};

struct hca {
	int idx;
	u8 cfg[256], wmask[256];
	phys_addr_t bar;
	void __iomem *mmio;
	struct mlx5_init_seg __iomem *iseg;
	struct feq eq[NEQ];
	u32 next_id, next_uar;
	spinlock_t lk;
	struct xarray qps, cqs, mks;
	struct fport port[MAXP];
	bool dead; /* it carries nothing, and answers nothing */
	u64 guid;
	u32 hc;
	u16 fail_op;
	u8 fail_status;
	u32 fail_synd;
	u16 down_op; /* its first port goes down with this command, when there have been so many */
	u32 down_in;
	u16 hang_op;
	u32 held; /* entries of the command queue that wait until it is 0 */
	unsigned long ncmd;
	struct pci_dev *pdev;
	struct fvec vec[32];
};

/* pci.c */
extern int nhcas, nports;
extern struct hca *hcas[MAXD];
void post_eqe(struct hca *h, struct feq *e, u8 type, u8 sub, const void *data, size_t dl);
bool event(struct hca *h, u8 type, u8 sub, const void *data, size_t dl);

/* firmware.c */
/* Queues, keys and ports: the firmware's thread holds it in each of its rounds, and whoever looks at them or has
 * them fail between two rounds. */
extern struct mutex world;
int firmware_begin(void);
void firmware_end(void);

/* data.c */
int buf_set(struct fbuf *b, __be64 *pas, u64 bytes, u32 shift, u32 off);
int rq_stride(struct fqp *q);
void qp_error(struct fqp *q);
bool set_port(struct hca *h, struct fport *port, bool up);
bool run_data(struct hca *h);

/* faults.c */
void faults_begin(void);
void faults_end(void);

#endif
