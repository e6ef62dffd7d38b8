// SPDX-License-Identifier: GPL-2.0
/* The host bridge, its functions, their event queues and interrupts. */
#include "fakehca.h"

#include <linux/irq.h>
#include <linux/irqdesc.h>
#include <linux/platform_device.h>

static ulong base;
module_param(base, ulong, 0444);
int nhcas = 1;
module_param_named(n, nhcas, int, 0444);
int nports = 1; /* of each */
module_param_named(ports, nports, int, 0444);
static int devid = 0x1017;
module_param(devid, int, 0444);

struct hca *hcas[MAXD];
static struct pci_bus *bus;
static struct platform_device *pd;
static struct pci_sysdata sd = {.domain = 0x10000, .node = NUMA_NO_NODE};
static struct resource mem_res = {.name = "fakehca BARs",
				  .flags = IORESOURCE_MEM | IORESOURCE_MEM_64 | IORESOURCE_PREFETCH},
		       bus_res = {.name = "fakehca bus", .start = 0, .end = 0, .flags = IORESOURCE_BUS};

/* ---- config space ---- */
static void w16(u8 *p, int o, u16 v)
{
	p[o] = v;
	p[o + 1] = v >> 8;
}

static void w32(u8 *p, int o, u32 v)
{
	w16(p, o, v);
	w16(p, o + 2, v >> 16);
}

static void cfg_init(struct hca *h)
{
	u8 *c = h->cfg, *w = h->wmask;
	w16(c, 0, 0x15b3);
	w16(c, 2, devid);
	w16(w, 4, 0x0546);
	w16(c, 6, 0x10);
	c[8] = 0;
	c[9] = 0;
	c[0xa] = 0x07;
	c[0xb] = 0x02; /* class 0207: InfiniBand controller */
	w32(c, 0x10, 0x0000000c | (u32)h->bar);
	w32(c, 0x14, (u64)h->bar >> 32);
	w32(w, 0x10, ~(u32)(BARSZ - 1));
	w32(w, 0x14, 0xffffffff); /* BAR0: 64-bit prefetchable */
	w16(c, 0x2c, 0x15b3);
	w16(c, 0x2e, 0x0008);
	c[0x34] = 0x60;
	c[0x3c] = 0xff;
	c[0x3d] = 0;
	c[0x60] = PCI_CAP_ID_EXP;
	c[0x61] = 0x9c;
	w16(c, 0x62, 0x0092); /* PCIe v2, root complex integrated endpoint */
	w32(c, 0x64, 0x8fc1);
	w16(w, 0x68, 0x7fef);
	w32(c, 0x6c, 0x103);
	w16(c, 0x72, 0x1103);
	w32(c, 0x84, 0x10);
	c[0x9c] = PCI_CAP_ID_MSIX;
	c[0x9d] = 0;
	w16(c, 0x9e, 31);
	w16(w, 0x9e, 0xc000); /* MSI-X, 32 vectors, table and PBA in BAR0 */
	w32(c, 0xa0, MSIX_OFF);
	w32(c, 0xa4, MSIX_OFF + 0x1000);
}

static int cfg_read(struct pci_bus *b, unsigned int devfn, int where, int size, u32 *val)
{
	struct hca *h = PCI_FUNC(devfn) || PCI_SLOT(devfn) >= nhcas ? NULL : hcas[PCI_SLOT(devfn)];
	int i;
	*val = 0;
	if (!h || b->number) {
		*val = ~0;
		return PCIBIOS_DEVICE_NOT_FOUND;
	}
	for (i = 0; i < size && where + i < 256; i++)
		*val |= (u32)h->cfg[where + i] << (8 * i);
	return PCIBIOS_SUCCESSFUL;
}

static int cfg_write(struct pci_bus *b, unsigned int devfn, int where, int size, u32 val)
{
	struct hca *h = PCI_FUNC(devfn) || PCI_SLOT(devfn) >= nhcas ? NULL : hcas[PCI_SLOT(devfn)];
	int i;
	if (!h || b->number)
		return PCIBIOS_DEVICE_NOT_FOUND;
	for (i = 0; i < size && where + i < 256; i++) {
		u8 m = h->wmask[where + i];
		h->cfg[where + i] = (h->cfg[where + i] & ~m) | ((val >> (8 * i)) & m);
	}
	return PCIBIOS_SUCCESSFUL;
}
static struct pci_ops ops = {.read = cfg_read, .write = cfg_write};

/* ---- event queues and interrupts ---- */
/* A vector's handler must run in hard interrupt context on the CPU that the vector points at (the affinity
 * code warns otherwise): an IPI takes us to that CPU, and irq_work there into interrupt context (the IPI's
 * own callback may also run from the idle loop). */
static void iw_fn(struct irq_work *w)
{
	struct fvec *v = container_of(w, struct fvec, iw);
	generic_handle_irq(v->irq);
}

static void ipi_fn(void *a)
{
	struct fvec *v = a;
	irq_work_queue(&v->iw);
}

static void raise_vec(struct hca *h, int i) /* called with interrupts off */
{
	struct fvec *v = &h->vec[i];
	struct irq_data *d;
	unsigned int cpu;
	if (v->irq <= 0 || !(d = irq_get_irq_data(v->irq)))
		return;
	cpu = cpumask_first(irq_data_get_effective_affinity_mask(d));
	if (cpu >= nr_cpu_ids || cpu == smp_processor_id())
		irq_work_queue(&v->iw);
	else
		smp_call_function_single_async(
		    cpu, &v->csd); /* busy: it has not run yet and will see this entry too */
}

void post_eqe(struct hca *h, struct feq *e, u8 type, u8 sub, const void *data, size_t dl)
{
	u32 idx = e->pi & ((1 << e->log) - 1);
	u64 off = (u64)idx * 64;
	u32 pg = off >> e->page_shift;
	struct mlx5_eqe *q;
	if (pg >= e->npas) {
		pr_err("fakehca: eqe outside of the queue\n");
		return;
	}
	q = phys_to_virt((e->pas[pg] & ~0xfffull) + (off & ((1ull << e->page_shift) - 1)));
	q->type = type;
	q->sub_type = sub;
	memset(&q->data, 0, sizeof(q->data));
	memcpy(&q->data, data, dl);
	wmb();
	q->owner = (e->pi >> e->log) & 1;
	e->pi++;
	wmb();
	raise_vec(h, e->intr);
}

bool event(struct hca *h, u8 type, u8 sub, const void *data, size_t dl)
{
	int i;
	bool r = false;
	unsigned long f;
	spin_lock_irqsave(&h->lk, f);
	for (i = 0; i < NEQ && !r; i++)
		if (h->eq[i].on && (h->eq[i].mask[0] & (1ull << type)) && type < 64) {
			post_eqe(h, &h->eq[i], type, sub, data, dl);
			r = true;
		}
	spin_unlock_irqrestore(&h->lk, f);
	return r;
}

static int __init fake_init(void)
{
	LIST_HEAD(res);
	int i, k;
	struct pci_dev *p;
	if (!base || nhcas < 1 || nhcas > MAXD || nports < 1 || nports > MAXP)
		return -EINVAL;
	for (i = 0; i < nhcas; i++) {
		struct hca *h = hcas[i] = kzalloc(sizeof(*h), GFP_KERNEL);
		h->idx = i;
		h->bar = base + i * BARSZ;
		h->mmio = ioremap(h->bar, 0x10000);
		if (!h->mmio)
			return -ENOMEM;
		memset_io(h->mmio, 0, 0x10000);
		h->iseg = h->mmio;
		spin_lock_init(&h->lk);
		xa_init(&h->qps);
		xa_init(&h->cqs);
		xa_init(&h->mks);
		{
			int v;
			for (v = 0; v < 32; v++) {
				h->vec[v].iw = IRQ_WORK_INIT_HARD(iw_fn);
				INIT_CSD(&h->vec[v].csd, ipi_fn, &h->vec[v]);
			}
		}
		h->next_id = 0x100;
		for (k = 0; k < nports; k++)
			h->port[k] = (struct fport){.up = true, .lid = 10 + i * nports + k};
		h->guid = 0xfa4e000000000000ull + i * 0x100;
		cfg_init(h);
		iowrite32be((35 << 16) | 16, &h->iseg->fw_rev);
		iowrite32be((5 << 16) | 4096, &h->iseg->cmdif_rev_fw_sub);
		/* Two entries of 64 bytes, of which the driver keeps one for pages: one command at a time. The
		 * doorbell is memory here, and one rung before the thread looks would hide the one before it. */
		iowrite32be(0x16, &h->iseg->cmdq_addr_l_sz);
		iowrite32be(0, &h->iseg->initializing);
		iowrite32be(0x01020304, &h->iseg->health.fw_ver);
	}
	mem_res.start = base;
	mem_res.end = base + nhcas * BARSZ - 1;
	pd = platform_device_register_simple("fakehca", -1, NULL, 0);
	if (IS_ERR(pd))
		return PTR_ERR(pd);
	dma_coerce_mask_and_coherent(&pd->dev, DMA_BIT_MASK(64));
	pci_add_resource(&res, &bus_res);
	pci_add_resource(&res, &mem_res);
	bus = pci_create_root_bus(&pd->dev, 0, &ops, &sd, &res);
	if (!bus)
		return -ENODEV;
	pci_scan_child_bus(bus);
	list_for_each_entry(p, &bus->devices, bus_list)
	{
		i = PCI_SLOT(p->devfn);
		if (i < nhcas)
			hcas[i]->pdev = p;
	}
	pci_bus_claim_resources(
	    bus); /* the BARs are set already: assigning would refuse a range that e820 calls reserved */
	list_for_each_entry(p, &bus->devices, bus_list)
	{
		i = PCI_SLOT(p->devfn);
		pr_info("fakehca: %s BAR0 %pR\n", pci_name(p), &p->resource[0]);
	}
	i = firmware_begin();
	if (i)
		return i;
	faults_begin();
	pci_bus_add_devices(bus);
	return 0;
}

static void __exit fake_exit(void)
{
	int i;
	faults_end();
	pci_lock_rescan_remove();
	pci_stop_root_bus(bus);
	pci_remove_root_bus(bus);
	pci_unlock_rescan_remove();
	firmware_end();
	for (i = 0; i < nhcas; i++) {
		{
			int v;
			for (v = 0; v < 32; v++)
				irq_work_sync(&hcas[i]->vec[v].iw);
		}
		iounmap(hcas[i]->mmio);
		kfree(hcas[i]);
	}
	platform_device_unregister(pd);
}

module_init(fake_init);
module_exit(fake_exit);
MODULE_LICENSE("GPL");
